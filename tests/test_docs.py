"""Proves that links and names in the documentation exist, that its examples run, and that its figures are current."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from children import ROOT, run_code
from llama_child import QUIET

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Every function that the seed's file defines, in its order, by class.
CACHE = """
    llama_kv_cache_recurrent clear seq_rm seq_cp seq_keep seq_add seq_div seq_pos_min seq_pos_max init_batch init_full
    prepare update defrag_sched find_slot get_can_shift s_copy s_mask total_size size_k_bytes size_v_bytes state_write
    state_read state_write_meta state_write_data state_read_meta state_read_data
""".split()
STATE = """
    llama_kv_cache_recurrent_state(status) llama_kv_cache_recurrent_state(full) llama_kv_cache_recurrent_state(batch)
    ~llama_kv_cache_recurrent_state next apply out_ids get_status get_ubatch get_n_kv get_head get_size get_k_l get_v_l
    s_copy s_mask
""".split()
FUNCTIONS = [f"llama_kv_cache_recurrent::{name}" for name in CACHE]
FUNCTIONS += [f"llama_kv_cache_recurrent_state::{name}" for name in STATE]


def test_readme_example_runs(child) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(code.splitlines()) <= 16
    texts = child(code).strip("\n")
    assert texts.count("In the beginning") == 2


CHECKPOINTS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "checkpoints.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("code", CHECKPOINTS, ids=["llama", "host"])
def test_the_examples_of_checkpoints_run(code: str) -> None:
    """Their asserts say what they are about."""
    assert code.count("assert ") >= 2
    run_code(code, env=QUIET)


def test_the_page_on_checkpoints_names_existing_calls_and_options() -> None:
    from rcache_plugin.checkpoints.api import Checkpoints
    from rcache_plugin.hosts.llama import Options

    page = (ROOT / "docs" / "checkpoints.md").read_text()
    calls = re.findall(r"^\| `checkpoints\.(\w+)", page, re.M)
    assert len(calls) >= 10
    for call in calls:
        assert hasattr(Checkpoints, call), call
    options = dict(re.findall(r"^\| `(\w+)=(\w+)` \|", page, re.M))
    assert len(options) == 4 and {name: str(getattr(Options(), name)) for name in options} == options


def test_the_figures_are_those_of_the_committed_benchmark() -> None:
    """Else run scripts/readme_figures.py."""
    spec = importlib.util.spec_from_file_location("readme_figures", ROOT / "scripts" / "readme_figures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    figures = json.loads(script.FIGURES.read_text())
    for name, block in (("README.md", script.readme(figures)), ("docs/benchmarks.md", script.page(figures))):
        text = (ROOT / name).read_text()
        assert script.filled(text, block) == text, name
        assert figures["date"] in block and figures["machine"] in block
    with pytest.raises(ValueError, match="once"):
        script.filled("no markers", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_files_that_a_contributor_is_sent_to_exist() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)[2:]
    assert len(rows) >= 12
    for change, files in rows:
        room = ""
        for name in re.findall(r"`([\w./*-]+\.(?:py|h|c))`", files):
            package = ROOT / "rcache_plugin"
            folders = [ROOT, package, package / "hosts" / "llama", package / room]
            assert any(list(folder.glob(name)) for folder in folders) or name == "cli/NAME.py", f"{change}: {name}"
            room = name.rpartition("/")[0] or room


def seed_rows() -> list[tuple[str, str]]:
    """(function of the seed, cell with where it lives here) of each row of the table."""
    text = (ROOT / "docs" / "seed-functions.md").read_text()
    return re.findall(r"^\| `([^`|]+)` \| (.+?) \|", text, re.M)


def test_every_function_of_the_seed_is_in_the_table_once() -> None:
    assert [function for function, _ in seed_rows()] == FUNCTIONS


def test_every_place_that_the_table_names_exists() -> None:
    n_names = 0
    for function, where in seed_rows():
        names = re.findall(r"`(rcache_plugin(?:\.\w+)+)`", where)
        assert names or "needs none" in where, f"{function} has no place"
        for name in names:
            resolve(name)
        n_names += len(names)
    assert n_names >= 60


def resolve(dotted: str) -> object:
    """The object of a dotted name whose first parts are modules. Raises when there is none."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            annotations = getattr(found, "__annotations__", {})
            slots = getattr(found, "__slots__", ())
            if not hasattr(found, part) and (part in annotations or part in slots):
                return annotations.get(part, part)
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)
