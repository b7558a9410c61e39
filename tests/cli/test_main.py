"""Proves that the command line starts quickly, and reports wrong arguments and missing packages in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from children import rcache, run, run_code


@pytest.mark.parametrize(
    "args",
    [
        ("run",),
        ("run", "-p", "x", "-n", "-1"),
        ("run", "-p", "x", "-n", "many"),
        ("run", "-p", "x", "--seqs", "0"),
        ("run", "-p", "x", "--temp", "-0.1"),
        ("run", "-p", "x", "--temp", "nan"),
        ("run", "-p", "x", "--placement", "elsewhere"),
        ("exec",),
        ("exec", "-m"),
        ("fly",),
        (),
    ],
)
def test_arguments_that_cannot_be_exit_with_2(args: tuple[str, ...]) -> None:
    done = rcache(*args, expect=2)
    assert done.stderr.startswith("usage: rcache")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["ggml", "tokenizers", "rich"])
def test_a_missing_extra_is_one_line_that_says_how_to_get_it(missing: str) -> None:
    out = run_code(
        f"""
        import contextlib, io, sys
        sys.modules[{missing!r}] = None
        from rcache_plugin.cli.main import main
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(["run", "-p", "x", "-n", "1", "--cells"])
        print(code, err.getvalue(), end="")
        """
    )
    code, _, message = out.strip().splitlines()[-1].partition(" ")
    assert code == "2"
    assert message.startswith("rcache: error: ")
    assert missing in message
    assert "rcache-plugin[mamba]" in message


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_nothing_that_they_can_do_without(option: str) -> None:
    out = run_code(
        f"""
        import contextlib, io, sys
        from rcache_plugin.cli.main import main
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main([{option!r}])
        heavy = {{"numpy", "cffi", "_cffi_backend", "ggml", "llama_cpp", "tokenizers", "rich", "platformdirs"}}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert out == "[]\n"


def test_the_console_script_is_the_same_program() -> None:
    script = Path(sys.executable).with_name("rcache")
    assert run([str(script), "--version"]).stdout == rcache("--version").stdout
