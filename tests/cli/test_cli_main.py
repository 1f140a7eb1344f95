"""Common behaviour of all commands: help, wrong arguments, errors, pipes."""

import contextlib
import functools
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import fakequant
from fakequant._cli import main, output
from fakequant._cli.parser import Answer

COMMANDS = ["info", "demo", "check", "summary", "ptq", "export", "verify", "card", "audit", "report"]
commands = importlib.import_module("fakequant._cli.commands")


def start(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


@pytest.fixture
def failing(monkeypatch):
    """Replaces the body of `fakequant info`."""
    return lambda body: monkeypatch.setattr(commands, "run_info", body)


def raising(error):
    def body(options):
        raise error

    return body


# --- help and wrong use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_an_example_and_the_exit_codes(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"\n  fakequant {command}" in text.split("example")[1]
    assert "exit codes:\n  0 " in text
    assert "--json" in text
    assert "--debug" in text


def test_help_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("    ") and line[4] != " "] == COMMANDS


def test_version_prints_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fakequant {fakequant.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "fakequant: the following arguments are required: COMMAND; see fakequant --help"),
        (["inof"], "'inof'"),
        (["info", "--jso"], "unrecognized arguments: --jso"),
        (["verify", "a.py:m"], "fakequant verify: the following arguments are required: FILE, DATA; see fakequant ver"),
        (["verify", "m", "f", "d", "--threads", "0"], "expected a whole number of at least 1, got '0'"),
        (["demo", "--seed", "-1"], "--seed"),
        (["summary", "a.py:m", "--recipe", "int9"], "expected int8, int8_dynamic"),
        (["report", "a.py:m", "--out", "x"], "--data"),
    ],
)
def test_wrong_arguments_give_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


# --- info -----------------------------------------------------------------------------------------------


def test_info_lists_installed_packages(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert fakequant.__version__ in text
    assert "installed " in text
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == fakequant.info().target
    assert found["torch"].startswith("2.")


def test_info_gives_null_for_a_package_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(commands, "PACKAGES", ("numpy", "no-such-package"))
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["installed"]["no-such-package"] is None


# --- errors ---------------------------------------------------------------------------------------------


def test_an_error_gives_one_line_or_a_traceback_with_debug(failing, capsys):
    failing(raising(KeyError("x")))
    assert main(["info"]) == 2
    assert capsys.readouterr() == ("", "fakequant info: KeyError: 'x'; --debug shows where\n")
    for arguments in (["info", "--debug"], ["--debug", "info"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("Traceback")
        assert "KeyError: 'x'" in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("no", name="onnx"),
            'This needs onnx, which is not installed; use: pip install "fakequant[',
        ),
        (ModuleNotFoundError("No module named 'x'", name="x"), "ModuleNotFoundError: No module named 'x'"),
        (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied"),
        (OSError(13, "'a' cannot be written.\nUse another path"), "'a' cannot be written; use another path"),
        (SystemExit(0), "The code that was run called sys.exit(0)"),
        (RuntimeError(), "RuntimeError; --debug"),
        (ValueError("Two lines.\n\n   Keep  them:\none"), "ValueError: Two lines; Keep them: one; --debug"),
    ],
)
def test_error_messages_are_shortened_to_one_line(error, message, failing, capsys):
    failing(raising(error))
    assert main(["info"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fakequant info: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("torch", "torch", "torch"),
        ("tqdm", "onnx", "onnx"),
        ("torch", "report", "report"),
        ("sklearn", "onnx", "demo"),
        ("onnx", "demo", "demo"),
    ],
)
def test_a_missing_package_names_the_extra_that_installs_all_a_command_needs(package, command, extra):
    assert output.one_line(ModuleNotFoundError(name=package), command).endswith(f'"fakequant[{extra}]"')


def test_errors_of_the_library_are_printed_without_their_type(failing, capsys):
    failing(lambda options: fakequant.set_num_threads(0))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "fakequant info: `n` must be a whole number of at least 1, got 0\n"


def test_long_error_messages_are_cut(failing, capsys):
    failing(raising(output.UsageError("x" * 5000)))
    assert main(["info"]) == 2
    assert len(capsys.readouterr().err) < 700


def test_extras_in_error_messages_install_the_packages_they_name():
    file = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(file.read_text())["project"]["optional-dependencies"]
    for module, extra in output.EXTRAS.items():
        package = {"sklearn": "scikit-learn"}.get(module, module.replace("_", "-"))
        assert any(re.match(rf"{package}\b", requirement) for requirement in _all_requirements(extras, extra)), module


def _all_requirements(extras, name):
    """Returns the requirements of an extra, with those of the extras that it names."""
    own = extras[name]
    others = [re.fullmatch(r"fakequant\[(\w+)\]", requirement) for requirement in own]
    return [*own, *(one for other in others if other for one in _all_requirements(extras, other[1]))]


def test_an_interrupt_gives_exit_code_130_without_a_traceback(failing, capsys):
    failing(raising(KeyboardInterrupt()))
    assert main(["info"]) == 130
    assert capsys.readouterr() == ("", "fakequant info: interrupted\n")


# --- stdout ---------------------------------------------------------------------------------------------


def test_output_of_other_python_code_goes_to_stderr(failing, capsys):
    def body(options):
        print("loading")
        return Answer("text", {"largest": float("inf"), "rows": [float("nan"), 1.5]})

    failing(body)
    assert main(["info", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"largest": None, "rows": [None, 1.5]}
    assert err == "loading\n"


def test_output_of_c_code_goes_to_stderr(failing, capfd):
    def body(options):
        os.write(1, b"from C\n")
        return Answer("text", {})

    failing(body)
    with open(1, "w", closefd=False) as stdout, contextlib.redirect_stdout(stdout):
        assert main(["info"]) == 0
    assert capfd.readouterr() == ("text\n", "from C\n")


def test_a_closed_pipe_is_not_an_error():
    for arguments in (["info"], ["--help"]):
        process = start("-m", "fakequant", *arguments)
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(30), err) == (0, "")
        process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fakequant", "info"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 2
    assert done.stderr == "fakequant info: No space left on device\n"


def test_text_that_stdout_cannot_encode_is_escaped(failing):
    failing(lambda options: Answer("a ≤ b", {}))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stdout):
        assert main(["info"]) == 0
    assert stdout.buffer.getvalue() == b"a \\u2264 b\n"


# --- as programs ----------------------------------------------------------------------------------------


def test_starting_imports_nothing_heavy():
    code = (
        "import sys, fakequant._cli; fakequant._cli.main(['info']); "
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'matplotlib', 'sklearn', 'tqdm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_script_and_the_module_behave_alike():
    from fakequant import __main__

    assert __main__.main is main
    code = "import sys; from fakequant.__main__ import main; sys.exit(main())"
    as_script = start("-c", code, "verify", "x")
    as_module = start("-m", "fakequant", "verify", "x")
    results = [(*process.communicate(timeout=120), process.returncode) for process in (as_script, as_module)]
    assert results[0] == results[1]
    assert results[0][2] == 2


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_ends_a_running_command_with_exit_code_130(tmp_path):
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(60)\nmodel = 1\n")
    # Tests that run in the background ignore the signal, and child processes would inherit that.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("-m", "fakequant", "summary", "slow.py:model", cwd=tmp_path, preexec_fn=listen)
    end = time.monotonic() + 60
    while not (tmp_path / "here").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "fakequant summary: interrupted\n")
