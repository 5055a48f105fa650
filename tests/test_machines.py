"""Machine descriptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagen import machines, resources
from megagen.errors import MachineError
from megagen.ir.plan import Machine

NAMES = ["b200", "gb300", "h200"]


def test_names() -> None:
    assert machines.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    machine = machines.load(name)
    assert machine.name == name
    assert set(machine.sources) == set(Machine.model_fields) - {"name", "arch", "sources"}
    assert all(text.strip() for text in machine.sources.values())


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_possible(name: str) -> None:
    m = machines.load(name)
    assert m.arch == {"h200": "sm_90a", "b200": "sm_100a", "gb300": "sm_103a"}[name]
    assert m.shared_bytes == 227 * 1024 and m.registers == 64 * 1024 and m.barriers == 16
    assert set(m.blocks_fit) == {1, 2, 4, 8} and m.blocks_fit[1] == m.sms
    assert all(n <= m.sms and n % cluster == 0 for cluster, n in m.blocks_fit.items())
    assert list(m.blocks_fit.values()) == sorted(m.blocks_fit.values(), reverse=True)
    assert m.icache_bytes < m.l2_bytes < 2**30 and 1e12 < m.hbm_bytes_per_s < 1e13


def test_a_users_own_machine(tmp_path: Path) -> None:
    text = (resources.machines() / "h200.toml").read_text()
    own = tmp_path / "mine.toml"
    own.write_text(text.replace("sms = 132", "sms = 114").replace('"h200"', '"mine"'))
    assert (machines.load(str(own)).name, machines.load(str(own)).sms) == ("mine", 114)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sms = 132", "", "sms: Field required"),
        ("sms = 132", 'sms = "many"', "sms: Input should be a valid integer"),
        ("sms = 132", "sms = 132\nsmss = 3", "smss: Extra inputs"),
        ("{ 1 = 132,", "{ one = 132,", "blocks_fit.one"),
        ("sms = 132", "sms = = 132", "Invalid value"),
        ("sms = 132", "sms = -1", "sms: must be greater than 0"),
        ("4.58e12", "0", "hbm_bytes_per_s: must be greater than 0"),
        ("4.58e12", "inf", "hbm_bytes_per_s: must be greater than 0 and finite"),
        ("4.58e12", "nan", "hbm_bytes_per_s: must be greater than 0 and finite"),
        ("{ 1 = 132,", "{ 1 = 0,", "blocks_fit.1: must be greater than 0"),
        ("{ 1 = 132,", "{ 0 = 132,", "blocks_fit.0: must be greater than 0"),
        ("sm_90a", "hopper", "arch: 'hopper' is not like sm_90a"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = (resources.machines() / "h200.toml").read_text()
    assert old in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(MachineError) as caught:
        machines.load(str(file))
    assert message in caught.value.message and str(file) in caught.value.message


def test_unknown_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="unknown machine 'H200'") as caught:
        machines.load("H200")
    assert caught.value.hint == "did you mean 'h200'?"
    with pytest.raises(MachineError, match="unknown machine"):
        machines.load(str(tmp_path / "none.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(MachineError, match=r"folder\.toml"):
        machines.load(str(folder))
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(MachineError, match=r"latin\.toml"):
        machines.load(str(tmp_path / "latin.toml"))


def test_a_machine_cut_to_a_few_sms() -> None:
    whole = machines.load("h200")
    few = machines.cut(whole, 4)
    assert (few.name, few.sms, dict(few.blocks_fit)) == ("h200 with 4 SMs", 4, {1: 4, 2: 4, 4: 4})
    assert machines.cut(whole, 6).blocks_fit == {1: 6, 2: 6, 4: 4}
    assert machines.cut(whole, whole.sms).blocks_fit == whole.blocks_fit  # clusters still fit no better
    for sms in (0, whole.sms + 1):
        with pytest.raises(MachineError, match=f"h200 with {sms} SMs"):
            machines.cut(whole, sms)
