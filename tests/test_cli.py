"""The command line: what it prints, its exit codes, and that errors are one line."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cukern
from cukern.cli import main

ROOT = Path(cukern.__file__).parents[1]
GOLDEN = Path(__file__).parent / "data" / "demo-qwen3" / "golden.npz"
PROMPT = "According to a careful calculation I have made"
NOTE = "cukern generate: on the CPU through the NumPy reference, as asked\n"
COMMANDS = [
    ["generate"], ["score"], ["demo"], ["info"], ["compile"], ["bench"],
    ["cache", "path"], ["cache", "show"], ["cache", "clear"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("CUKERN_DEBUG", raising=False)


@pytest.fixture
def cli(capfd, monkeypatch):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main(list(arguments))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | more


def assert_one_line(err: str, code: int, expected: int) -> None:
    assert code == expected, err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert err.startswith("cukern")


# -- help ----------------------------------------------------------------------------------------------------------


def test_help_of_all_commands_has_an_example(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for command in ("generate", "score", "demo", "info", "compile", "cache", "bench"):
        assert f"\n  {command} " in out
    for command in COMMANDS:
        code, out, _ = cli(*command, "--help")
        assert code == 0
        assert f"Example: cukern {' '.join(command)}" in out or (command == ["cache", "path"] and "Example:" in out)


def test_summaries_of_the_commands_fit_a_terminal(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], ["cache", "--help"]):
        _, out, _ = cli(*arguments)
        summaries = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
        assert len(summaries) >= 3
        for line in summaries:
            assert line.endswith(".")
            assert "..." not in line
            assert len(line) <= 80


def test_version(cli):
    assert cli("--version") == (0, f"cukern {cukern.__version__}\n", "")


def test_help_starts_fast_and_imports_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "cukern", "--help"]
    times = []
    for _ in range(3):
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported
    for heavy in ("numpy", "cupy", "tokenizers", "jinja2", "huggingface_hub", "cukern.engine.llm", "cukern.jit"):
        assert heavy not in imported
    assert min(times) < 1.5  # of the processor's time: 0.2 s, whatever else the machine does


# -- usage errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["generate"], "Missing argument"),
        (["generate", "demo", "x", "--bogus"], "No such option: --bogus"),
        (["generate", "demo", "x", "--top-p", "3"], r"top_p must be in (0, 1]"),
        (["generate", "demo", "x", "--temperature", "-1"], "temperature must be >= 0"),
        (["generate", "demo", "x", "--top-k", "-5"], "top_k must be >= 1"),
        (["generate", "demo", "x", "--max-tokens", "-1"], "max_tokens must be >= 0, got -1 (see"),
        (["generate", "demo", "x", "--seed", "-1"], "seed must be in"),
        (["generate", "demo", "x", "--stop", ""], "stop must not hold an empty string"),
        (["generate", "demo", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "demo", "x", "--device", "gpu"], "must be cuda, cuda:N, cpu or emulated, got 'gpu'"),
        (["generate", "demo", "x", "--dtype", "int8"], "must be auto, float16 or bfloat16"),
        (["generate", "demo", "x", "--logprobs"], "--logprobs needs --json"),
        (["generate", "demo", "x", "--no-think"], "need --chat"),
        (["generate", "demo", "x", "--file", "/nonexistent"], "/nonexistent"),
        (["score", "demo", "x"], "give at least one completion of the prompt"),
        (["score", "demo", "x", "y", "--file", __file__], "give a prompt or --file, not both"),
        (["score", "demo", "x", "y", "-t", "0"], "--temperature must be positive and finite, got 0.0"),
        (["demo", "--tokens", "0"], "--tokens"),
        (["demo", "--temperature", "nan"], "temperature must be finite in float32 (>= 0), got nan"),
        (["demo", "--temperature", "-1"], "temperature must be >= 0 (0 is greedy), got -1.0"),
        (["demo", "--emulate", "--device", "cpu"], "--emulate contradicts --device cpu"),
        (["compile", "--arch", "volta"], "arch='volta'"),
        (["compile", "nothing"], "no kernel file 'nothing.cu'"),
        (["cache", "clear", "--arch", "x"], "arch='x'"),
        (["bench", "nothing"], "no part 'nothing'"),
        (["bench", "--op", "nothing"], "no operator 'nothing'"),
        (["bench", "--dtype", "float32"], "must be float16 or bfloat16"),
        (["bench", "portable", "--op", "linear"], "--op is of the part 'ops', which is not run"),
        (["bench", "--op", "linear", "--batch", "4"], "--batch is of the part 'decode', which is not run"),
        (["bench", "ops", "--context", "4"], "--context is of the part 'decode'"),
        (["bench", "prefill", "--sampling", "greedy"], "--sampling is of the part 'decode'"),
        (["bench", "prefill", "--compiled-peer"], "--compiled-peer is of the part 'decode'"),
        (["bench", "decode", "--length", "4"], "--length is of the part 'prefill'"),
        (["bench", "decode", "--compiled-peer", "--no-peers"], "--compiled-peer contradicts --no-peers"),
        (["bench", "--csv", "/nonexistent/x.csv"], "there is no folder /nonexistent"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(cli, arguments, message):
    code, out, err = cli(*arguments)
    assert_one_line(err, code, 2)
    assert message in err
    assert "--help" in err
    assert out == ""


def test_without_a_command_the_help_is_shown(cli):
    for arguments in ([], ["cache"]):
        code, out, err = cli(*arguments)
        assert code == 2
        assert "Usage: cukern" in out + err


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_failure_is_one_line_and_code_1(cli, tmp_path):
    code, out, err = cli("generate", str(tmp_path / "absent"), "x")
    assert_one_line(err, code, 1)
    assert err.startswith("cukern generate: error: ")
    assert "absent" in err
    assert out == ""


def test_debug_shows_the_traceback(cli, tmp_path, monkeypatch):
    for arguments in (
        ["--debug", "generate", str(tmp_path / "absent"), "x"],
        ["generate", str(tmp_path / "no"), "x", "--debug"],
    ):
        with pytest.raises(FileNotFoundError):
            cli(*arguments)
    monkeypatch.setenv("CUKERN_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        cli("generate", str(tmp_path / "absent"), "x")


def test_debug_behind_a_double_dash_is_a_prompt(cli):
    code, out, _ = cli("generate", "demo", "-n", "1", "--json", "--", "--debug")
    assert code == 0
    assert json.loads(out)["prompt"] == "--debug"


def test_an_unexpected_error_names_its_type(cli, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("line one\nline two")

    monkeypatch.setattr("cukern.cli.generate._load", broken)
    code, _, err = cli("generate", "demo", "x", "--device", "cpu")
    assert_one_line(err, code, 1)
    assert "ZeroDivisionError: line one (--debug shows the rest)" in err


def test_interrupt_is_code_130(cli, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("cukern.cli.generate._run", interrupted)
    code, _, err = cli("generate", "demo", "x", "--device", "cpu")
    assert code == 130
    assert "Traceback" not in err


def test_ctrl_c_in_a_running_process():
    command = [sys.executable, "-u", "-m", "cukern", "demo", "--device", "cpu", "--tokens", "1024"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()  # it is past its imports
        assert "on the CPU" in line
        process.stdout.read(60)  # it generates
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_a_closed_pipe_is_quiet():
    command = [sys.executable, "-u", "-m", "cukern", "generate", "demo", PROMPT, "--device", "cpu", "-n", "400"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert err == NOTE.encode()
    assert process.returncode == 141


# -- generate ------------------------------------------------------------------------------------------------------


def expected_text(tokens: int) -> str:
    from cukern.engine import Tokenizer
    from cukern.models import demo_checkpoint

    with np.load(GOLDEN) as golden:
        return Tokenizer(demo_checkpoint()).decode(golden["greedy_ids"][0][:tokens])


GENERATE = ("generate", "demo", "--device", "cpu", "-n", "12")


def test_generate_streams_or_prints_the_same(cli, tmp_path):
    expected = (0, expected_text(12) + "\n", NOTE)
    assert cli(*GENERATE, PROMPT) == expected
    assert cli(*GENERATE, PROMPT, "--no-stream") == expected
    assert cli(*GENERATE, stdin=PROMPT.encode() + b"\n") == expected
    assert cli(*GENERATE, "-", stdin=PROMPT.encode()) == expected
    (tmp_path / "prompt.txt").write_bytes(PROMPT.encode() + b"\r\n")
    assert cli(*GENERATE, "--file", str(tmp_path / "prompt.txt")) == expected


def test_generate_json(cli):
    code, out, err = cli(*GENERATE, PROMPT, "--json", "--logprobs")
    assert (code, err, out.count("\n")) == (0, NOTE, 1)
    got = json.loads(out)
    with np.load(GOLDEN) as golden:
        assert got["token_ids"] == golden["greedy_ids"][0][:12].tolist()
        np.testing.assert_allclose(got["logprobs"], golden["greedy_logprobs"][0][:12], atol=1e-3)
        assert got["prompt_tokens"] == golden["input_ids"].shape[1]
    assert (got["prompt"], got["text"]) == (PROMPT, expected_text(12))
    assert (got["finish_reason"], got["stop_reason"], got["seed"], got["device"]) == ("length", None, None, "cpu")


def test_generate_options_reach_the_sampler(cli):
    options = ("--json", "-t", "0.9", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "7")
    once, again = (json.loads(cli(*GENERATE, "The", *options)[1]) for _ in range(2))
    assert once["token_ids"] == again["token_ids"]
    assert once["seed"] == 7
    stopped = json.loads(cli(*GENERATE, PROMPT, "--json", "--stop", "nothing", "--stop", " duty")[1])
    assert (stopped["text"], stopped["stop_reason"]) == (" it my", " duty")
    token = json.loads(cli(*GENERATE, PROMPT, "--json")[1])["token_ids"][1]
    assert json.loads(cli(*GENERATE, PROMPT, "--json", "--stop-token-id", str(token))[1])["stop_reason"] == token


def test_generate_chat(cli):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    from cukern.engine import Tokenizer
    from cukern.models import demo_checkpoint

    tokenizer = Tokenizer(demo_checkpoint())
    got = json.loads(cli(*GENERATE, "Where?", "--chat", "--system", "Be brief.", "--no-think", "--json")[1])
    assert got["prompt_tokens"] == len(tokenizer.encode(tokenizer.chat_template.render(messages)))


def test_generate_refuses_bad_input(cli, tmp_path):
    for stdin, message in ((b"", "empty"), (b"\xff\xfe", "standard input is not UTF-8 text")):
        code, _, err = cli(*GENERATE, stdin=stdin)
        assert_one_line(err, code, 1)
        assert message in err
    code, _, err = cli(*GENERATE, "x", "--max-model-len", "5")
    assert_one_line(err, code, 1)
    assert "prompt has 1 token; with max_tokens 12 that exceeds max_model_len 5; lower max_tokens or raise" in err
    (tmp_path / "prompt.txt").write_text("x")
    code, _, err = cli(*GENERATE, "x", "--file", str(tmp_path / "prompt.txt"))
    assert_one_line(err, code, 2)


def test_a_stop_token_outside_the_vocabulary_is_wrong_usage(cli):
    for token, message in (("99999", "99999 is outside the vocabulary 0..4095"), ("-1", "")):
        code, out, err = cli(*GENERATE, "x", "--stop-token-id", token)
        assert_one_line(err, code, 2)
        assert f"Invalid value for '--stop-token-id': {message}" in err
        assert out == ""


def test_a_text_without_a_tokenizer_names_the_file(cli, tmp_path):
    from cukern.models import demo_checkpoint

    for file in demo_checkpoint().iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    for command in (["generate", str(tmp_path), "x"], ["score", str(tmp_path), "x", "y"]):
        code, _, err = cli(*command, "--device", "cpu")
        assert_one_line(err, code, 1)
        assert f"{tmp_path / 'tokenizer.json'} does not exist" in err
        assert "token ids" not in err
    line = json.dumps({"prompt": [1, 2], "completion": [3]}).encode()
    assert cli("score", str(tmp_path), "--device", "cpu", stdin=line)[0] == 0


def test_output_to_a_terminal_without_unicode():
    command = [sys.executable, "-m", "cukern", *GENERATE, "𝔘𝔫𝔦 漢字 😸", "--chat", "--json"]
    result = subprocess.run(
        command, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# -- score ---------------------------------------------------------------------------------------------------------

SCORE = ("score", "demo", "--device", "cpu")


def test_score_of_arguments_and_of_lines(cli, tmp_path):
    code, out, err = cli(*SCORE, PROMPT, " it", " that I")
    assert (code, err) == (0, NOTE.replace("generate", "score"))
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["prompt_index"], first["completion"], second["completion"]) == (0, " it", " that I")
    assert len(first["token_ids"]) == len(first["logprobs"]) == len(first["is_greedy"])
    assert second["total"] == pytest.approx(sum(second["logprobs"]), abs=1e-6)
    lines = [
        {"prompt": PROMPT, "completions": [" it", " that I"]},
        {"prompt": [1, 2, 3], "completion": second["token_ids"]},
    ]
    text = "\n".join(json.dumps(line) for line in lines).encode() + b"\n\n"
    code, out, _ = cli(*SCORE, stdin=text)
    assert code == 0
    got = [json.loads(line) for line in out.splitlines()]
    assert [g["prompt_index"] for g in got] == [0, 0, 1]
    np.testing.assert_allclose(got[0]["logprobs"], first["logprobs"], atol=1e-4)
    assert got[2]["completion"] == got[2]["token_ids"] == second["token_ids"]
    (tmp_path / "lines").write_bytes(text)
    assert cli(*SCORE, "--file", str(tmp_path / "lines"), "-t", "0.5")[0] == 0


def test_score_of_the_greedy_continuation(cli):
    tokens = json.loads(cli(*GENERATE, PROMPT, "--json")[1])["token_ids"]
    line = json.dumps({"prompt": PROMPT, "completion": tokens}).encode()
    (got,) = (json.loads(text) for text in cli(*SCORE, stdin=line)[1].splitlines())
    assert got["is_greedy"] == [True] * 12
    with np.load(GOLDEN) as golden:
        np.testing.assert_allclose(got["logprobs"], golden["greedy_logprobs"][0][:12], atol=1e-3)


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b'{"prompt": "a", "completion": "b"}\nnothing', "standard input, line 2 is not JSON"),
        (b'{"prompt": "a"}', 'line 1 must hold "prompt" and "completion" or "completions"'),
        (b'{"prompt": "a", "completion": "b", "completions": []}', "line 1 must hold"),
        (b'{"prompt": 1, "completion": "b"}', "line 1: prompt and completions must be texts or lists of token ids"),
        (b'{"prompt": "a", "completions": "b"}', "line 1: prompt and completions must be texts"),
        (b'["a", "b"]', "line 1 must hold"),
        (b'\n{"prompt": "a", "completion": "b", "temperature": 2}', 'line 2 holds the unknown key "temperature"'),
        (b"\xff\xfe", "standard input is not UTF-8 text"),
    ],
)
def test_score_refuses_bad_lines_before_it_loads(cli, stdin, message):
    code, out, err = cli("score", "/absent", stdin=stdin)
    assert_one_line(err, code, 1)
    assert message in err
    assert out == ""


def test_score_counts_prompts_through_all_of_the_input(cli, monkeypatch):
    monkeypatch.setattr("cukern.cli.score._LINES", 2)
    good = [{"prompt": [1], "completion": [2]}] * 3
    for bad, message in (
        ({"prompt": [1], "completions": [[3], [10**6]]}, "completions[3][1] has token id 1000000, outside the vocab"),
        ({"prompt": "a\ud800", "completion": [2]}, "prompts[3] holds a lone surrogate ('\\ud800' at character 1)"),
        ({"prompt": [1.5], "completion": [2]}, "prompts[3] must hold integer token ids, got 1.5"),
    ):
        lines = "\n\n".join(json.dumps(line) for line in [*good, bad])
        code, out, err = cli(*SCORE, stdin=lines.encode())
        assert_one_line(err.split("\n", 1)[1], code, 1)
        assert f"error: standard input, line 7: {message}" in err
        assert [json.loads(line)["prompt_index"] for line in out.splitlines()] == [0, 1]


# -- demo ----------------------------------------------------------------------------------------------------------


def test_demo_on_the_cpu(cli):
    code, out, err = cli("demo", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "on the CPU through the NumPy reference, as asked" in out
    assert f"\n\n{PROMPT}{expected_text(48)}\n\n48 tokens in " in out
    assert "\n1 token in " in cli("demo", "--device", "cpu", "--tokens", "1")[1]


def test_demo_checks_nothing_against_itself(cli):
    code, out, err = cli("demo", "--device", "cpu", "--check")
    assert_one_line(err, code, 1)
    assert "there is nothing to compare on the CPU through the NumPy reference, as asked; leave --check out" in err
    assert out == ""


def test_demo_shows_a_prompt_that_it_can_run(cli, monkeypatch):
    code, out, err = cli("demo", "--device", "cpu", "--prompt", "whale " * 2048)
    assert_one_line(err, code, 1)
    assert "that alone exceeds max_model_len 2048, the model's own limit; shorten it\n" in err
    assert out.count("\n") == 1
    assert "whale" not in out

    def no_compiler(self):
        raise RuntimeError("there is no C++ compiler")

    monkeypatch.setattr("cukern.engine.engine.Engine._step", no_compiler)
    code, out, err = cli("demo", "--device", "cpu")
    assert_one_line(err, code, 1)
    assert "there is no C++ compiler" in err
    assert out.count("\n") == 1
    assert PROMPT not in out


def test_an_error_amid_the_text_begins_a_line(cli, monkeypatch):
    from cukern.engine.engine import Engine

    step, steps = Engine._step, []

    def broken(self):
        steps.append(0)
        if len(steps) == 8:
            raise RuntimeError("it broke")
        return step(self)

    monkeypatch.setattr(Engine, "_step", broken)
    code, out, err = cli("demo", "--device", "cpu")
    assert_one_line(err, code, 1)
    assert f"\n{PROMPT} it" in out
    assert out.endswith("\n")


def test_demo_says_why_it_runs_where_it_runs(cli):
    code, out, _ = cli("demo", "--tokens", "2")
    assert code == 0
    first = out.splitlines()[0]
    assert ("because no GPU can be used: " in first) or ("on the GPU " in first)


def test_demo_check_fails_on_other_tokens(cli, monkeypatch):
    from cukern.engine import Completion

    def wrong(llm, prompt, sampling, **options):
        return Completion("", [1, 2, 3], "length", None, None, [], None)

    monkeypatch.setattr("cukern.cli.generate._run", wrong)
    code, _, err = cli("demo", "--device", "emulated", "--tokens", "3", "--check")
    assert_one_line(err, code, 1)
    assert "token 0 differs from the NumPy reference" in err


@pytest.mark.gpu
def test_demo_on_the_gpu(cli):
    code, out, _ = cli("demo", "--check")
    assert code == 0
    assert "on the GPU" in out
    assert f"\n{PROMPT}{expected_text(48)}\n" in out


# -- info, compile, cache ------------------------------------------------------------------------------------------


def test_info(cli, tmp_path):
    code, out, err = cli("info")
    assert (code, err) == (0, "")
    for name in ("cukern", "GPU", "driver", "CuPy", "NVRTC", "CUDA headers", "kernels", "cache"):
        assert any(line.startswith(name) for line in out.splitlines()), name
    assert str(tmp_path / "cache") in out
    state = json.loads(cli("info", "--json")[1])
    if state["architectures"]:  # NVRTC knows older ones, which the kernels do not run on
        assert "\ncompiles for  sm_80 to sm_" in out
    assert state["usable"] == ("no GPU" not in out)
    if not state["usable"]:
        assert "\nproblem " in out


def test_compile_and_cache(cli, tmp_path):
    code, out, _ = cli("compile", "swiglu", "--arch", "sm_80", "--jobs", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[-1].startswith(f"{len(lines) - 1} kernels compiled in ")
    assert lines[-1].endswith("for sm_80; 0 failed, 0 spill registers")
    assert all("sm_80" in line and "registers" in line for line in lines[:-1])
    again = cli("compile", "swiglu.cu", "--arch", "sm_80", "--arch", "80", "--quiet")[1]
    assert again.startswith(f"{len(lines) - 1} kernels compiled in ")
    assert again.endswith(" for sm_80; 0 failed, 0 spill registers\n")
    assert cli("cache", "path")[1] == f"{tmp_path / 'cache'}\n"
    shown = json.loads(cli("cache", "show", "--json")[1])
    assert shown["per_arch"] == {"sm_80": len(lines) - 1}
    assert f"{len(lines) - 1} kernels" in cli("cache", "show")[1]
    assert cli("cache", "clear", "--arch", "sm_90a")[1].startswith("deleted 0 kernels")
    assert cli("cache", "clear")[1].startswith(f"deleted {len(lines) - 1} kernels")
    assert json.loads(cli("cache", "show", "--json")[1])["entries"] == 0


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("sm_85", "arch='sm_85' is not known to this NVRTC, which compiles for sm_80, sm_86"),
        ("sm_70", "arch='sm_70' is below sm_80, the oldest that cukern's kernels run on; use sm_80, sm_86"),
        ("compute_75", "arch='compute_75' is below sm_80"),
    ],
)
def test_compile_refuses_an_architecture_once(cli, arch, message):
    code, out, err = cli("compile", "swiglu", "--arch", arch)
    assert_one_line(err, code, 2)
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["linear_sm90", "--arch", "sm_80", "--arch", "sm_90"],
            "linear_sm90.cu has no kernel for sm_80, sm_90; give --arch ",
        ),
        (["swiglu", "decode_step.cu", "--arch", "sm_90"], "decode_step.cu has no kernel for sm_90; give --arch "),
    ],
)
def test_compile_refuses_what_would_compile_nothing(cli, options, message):
    code, out, err = cli("compile", *options)
    assert_one_line(err, code, 2)
    assert message in err
    assert "sm_90a" in err
    assert out == ""


@pytest.mark.parametrize("where", ["file", "file/sub", "folder"])
def test_compile_refuses_a_cache_that_cannot_be_written(cli, tmp_path, monkeypatch, where):
    from cukern import jit

    monkeypatch.setattr(jit, "compile_all", lambda *arguments: pytest.fail("compiled something"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sm_80").write_text("")  # one of the folders in it; for root no folder is read-only
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / where))
    code, out, err = cli("compile", "swiglu", "--arch", "sm_80")
    assert_one_line(err, code, 1)
    assert f"the kernel cache {tmp_path / where} cannot be written (" in err
    assert "set CUKERN_CACHE_DIR to a folder that can be written" in err
    assert out == ""


def test_compile_fails_where_a_kernel_is_not_kept(cli, monkeypatch):
    from cukern.jit.cache import Cache

    def full(self, arch, key, entry):
        self._memory[arch, key] = entry

    monkeypatch.setattr(Cache, "_put", full)
    code, out, err = cli("compile", "swiglu", "--arch", "sm_80")
    assert_one_line(err, code, 1)
    assert "kernels could not be written to " in err
    assert "0 failed" in out


def test_compile_without_cupy_is_one_error(cli, monkeypatch):
    from cukern.jit import toolchain

    toolchain.forget()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    monkeypatch.setattr(toolchain, "cupy_wheels", list)
    for options in ([], ["--arch", "sm_80"]):
        code, out, err = cli("compile", *options)
        assert_one_line(err, code, 1)
        assert 'CuPy is not installed: pip install "cukern[cuda12]"' in err
        assert out == ""


def test_a_kernel_that_fails_to_compile_is_code_1(cli, monkeypatch):
    from cukern import jit

    spec = jit.variants()[0]
    bad = jit.Built(spec, "sm_80", None, "line 3: error:\nno such thing")
    spilling = jit.Built(spec, "sm_80", jit.Resources("sm_80", 255, 0, 64, 16, 32, 1024))

    def compile_all(targets, jobs, progress, specs):
        for i, built in enumerate((bad, spilling)):
            progress(built, i + 1, 2)
        return [bad, spilling]

    monkeypatch.setattr(jit, "compile_all", compile_all)
    code, out, err = cli("compile", "--arch", "sm_80")
    assert code == 1
    assert "FAIL line 3: error: no such thing" in err
    assert "SPILLS 16+32 B" in out
    assert "1 failed, 1 spill registers" in out


# -- bench ---------------------------------------------------------------------------------------------------------


def test_bench_without_a_gpu_refuses(cli, monkeypatch):
    monkeypatch.setattr("cukern.models.device.cuda_problem", lambda: "it is in the other machine")
    code, out, err = cli("bench", "ops")
    assert_one_line(err, code, 1)
    assert "bench measures a GPU, and none is usable: it is in the other machine" in err
    assert out == ""


def test_bench_options_and_exit_code(cli, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("cukern.bench.run.run", lambda options: seen.append(options) or len(seen) - 1)
    assert cli("bench", "--op", "rope", "--op", "linear", "--no-peers", "--csv", str(tmp_path / "x.csv"))[0] == 0
    decode = ("--batch", "2", "--batch", "4", "--context", "9", "--sampling", "greedy")
    assert cli("bench", "decode", "prefill", *decode, "--length", "7")[0] == 1
    assert cli("bench")[0] == 1
    first, second, third = seen
    assert (list(first.parts), list(first.operators), first.peers) == (["ops"], ["rope", "linear"], False)
    assert (list(second.parts), list(second.batches), list(second.contexts)) == (["decode", "prefill"], [2, 4], [9])
    assert (list(second.lengths), list(second.samplings)) == ([7], ["greedy"])
    assert (list(third.parts), list(third.batches), third.model) == (
        ["ops", "portable", "model", "prefill", "decode", "startup", "exactness"],
        [],
        "0.6B",
    )


def test_parts_of_the_command_line_are_those_of_the_benchmark():
    from cukern.bench import run
    from cukern.cli import bench

    assert bench.PARTS == run.PARTS
