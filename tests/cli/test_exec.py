"""Proves that ``rcache exec`` runs a script or module as python would, on this package's cache."""

from __future__ import annotations

from pathlib import Path

from children import RCACHE, rcache, run


def test_exec_runs_a_program_on_this_cache(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nimport llama_cpp\nfrom rcache_plugin.hosts.llama import installed\n"
        "print(__name__, sys.argv, installed())\nraise KeyError('its own')\n"
    )
    by_path = run([*RCACHE, "exec", str(program), "--seqs", "-h"], timeout=600, expect=1)
    by_name = run([*RCACHE, "exec", "-m", "program", "x"], timeout=600, expect=1, cwd=tmp_path)
    assert by_path.stdout.splitlines()[-1] == f"__main__ {[str(program), '--seqs', '-h']} True"
    assert by_name.stdout.splitlines()[-1] == f"__main__ {[str(program), 'x']} True"
    assert "KeyError: 'its own'" in by_path.stderr
    missing = rcache("exec", "nowhere.py", expect=2).stderr
    assert "nowhere.py" in missing
    assert len(missing.splitlines()) == 1
