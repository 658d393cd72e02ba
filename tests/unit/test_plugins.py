"""Methods and parts in files: loaded once, registered, named in errors, and recorded with their hash."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import HoldersMean
from fedstrata.check import find_target
from fedstrata.codec import CODECS
from fedstrata.data.config import DataConfig, PartitionConfig
from fedstrata.data.partition import PARTITIONS, partition
from fedstrata.data.sources import load_table
from fedstrata.errors import ConfigError, DataError
from fedstrata.experiment.plugins import (
    KINDS,
    check_registered,
    is_reference,
    load_file,
    load_method,
    load_part,
    load_plugins,
    plugin_record,
)
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import METHODS, PairRule

CODEC = '''
"""Halves and doubles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.codec import CODECS, Codec, Float32
from fedstrata.core.wire import Payload


{decorator}
@dataclass(frozen=True)
class Mine(Codec):
    id: ClassVar[str] = "{id}"
    factor: float = 2.0
    lossless = False
    fixed_length = True
    deltas_only = False
    deterministic = True

    def encode(self, tensors, layout, residual, rng):
        return Float32().encode({{n: t / type(t.flat[0])(self.factor) for n, t in tensors.items()}}, layout, {{}}, rng)

    def decode(self, payload, layout):
        return Float32().decode(payload, layout)

    def max_bytes(self, layout):
        return Float32().max_bytes(layout)
'''
METHOD = '''
from fedstrata.method.fedavg import fedavg


def mymethod(weight_by: str = "uniform"):
    """Mine: every client counts the same."""
    return fedavg(weight_by)
'''


@pytest.fixture(autouse=True)
def _forget_files() -> Iterator[None]:
    """Takes out what a test loaded."""
    yield
    for name in [n for n in sys.modules if n.startswith("fedstrata_file_")]:
        for kind in KINDS.values():
            kind.registry.forget(name)
        METHODS.forget(name)
        del sys.modules[name]


def codec_file(folder: Path, name: str = "my_codec.py", part_id: str = "halves", decorator: str = "") -> Path:
    path = folder / name
    path.write_text(CODEC.format(id=part_id, decorator=decorator))
    return path


def spec(**values: Any) -> ExperimentSpec:
    return ExperimentSpec.model_validate(values)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("./a.py:b", True), ("../x/y.py:B_1", True), ("fedavg", False), ("a.py", False), ("a.py:1b", False), (3, False)],
)
def test_a_reference_is_a_python_file_and_a_name(text: object, is_one: bool) -> None:
    assert is_reference(text) == is_one


def test_a_spec_brings_its_files_and_their_options(tmp_path: Path) -> None:
    codec_file(tmp_path)
    (tmp_path / "my_method.py").write_text(METHOD)
    uplink = {"id": "error_feedback", "inner": {"id": "./my_codec.py:Mine", "factor": 4.0}}
    load_plugins(spec(method={"name": "./my_method.py:mymethod"}, codec={"uplink": uplink}), tmp_path)
    method = METHODS.build("./my_method.py:mymethod", {"weight_by": "num_examples"})
    assert method.aggregator.weight_by == "num_examples"  # type: ignore[attr-defined]
    built = CODECS.build(uplink)
    assert built.inner.factor == 4.0  # type: ignore[attr-defined]
    assert CODECS["halves"] is type(built.inner)  # type: ignore[attr-defined]


@pytest.mark.parametrize("decorator", ["", "@CODECS.register"])
def test_every_part_of_a_file_is_found_by_its_id(tmp_path: Path, decorator: str) -> None:
    part = load_part("codec", f"{codec_file(tmp_path, decorator=decorator)}:Mine", tmp_path)
    assert CODECS["halves"] is part


def test_a_file_is_run_once_and_again_only_if_it_changed(tmp_path: Path) -> None:
    path = codec_file(tmp_path)
    first = load_file(path)
    assert load_file(path) is first
    part = CODECS["halves"]
    path.write_text(path.read_text().replace("factor: float = 2.0", "factor: float = 8.0"))
    second = load_file(path)
    assert second is not first
    assert CODECS["halves"] is not part
    assert CODECS.build("halves").factor == 8.0  # type: ignore[attr-defined]


def test_two_files_with_one_id_are_both_named(tmp_path: Path) -> None:
    first, second = codec_file(tmp_path, "one.py"), codec_file(tmp_path, "two.py")
    load_file(first)
    with pytest.raises(ConfigError) as caught:
        load_file(second)
    assert f"{first}:Mine and {second}:Mine" in str(caught.value)
    assert CODECS["halves"].__module__ == load_file(first).__name__


def test_a_file_with_the_id_of_a_built_in_part_is_a_clash_of_both(tmp_path: Path) -> None:
    path = codec_file(tmp_path, part_id="int8")
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    assert f"fedstrata.codec.blockwise.Int8 and {path}:Mine" in str(caught.value)


def test_a_method_with_the_name_of_a_built_in_one_is_a_clash_of_both(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(METHOD.replace("mymethod", "fedprox"))
    with pytest.raises(ConfigError, match=r"fedstrata\.method\.fedprox\.fedprox and .*m\.py:fedprox"):
        load_method("./m.py:fedprox", tmp_path)


@pytest.mark.parametrize(
    ("code", "name", "told"),
    [
        ("x = 1\ny = 1 / 0\n", "x", r"bad\.py, line 2\n.*ZeroDivisionError"),
        ("def f(:\n", "f", r"bad\.py, line 1\n.*SyntaxError"),
        ("import no_such_neighbor\n", "f", "a file stands alone"),
        ("def mymethod():\n    pass\n", "mymetod", 'did you mean "mymethod"'),
        ("mymethod = 3\n", "mymethod", "is no method"),
        ("import sys\nsys.exit(0)\n", "f", r"bad\.py, line 2\n.*SystemExit: 0"),
        ("class Odd(BaseException): pass\nraise Odd('!')\n", "f", r"bad\.py, line 2\n.*Odd: !"),
        ("raise ValueError('\\ud800' + 9999 * 'x')\n", "f", r"ValueError: \?x{400,500}…\n"),
        ("from fedstrata.method import METHODS\n@METHODS.register\ndef f(): ...\n", "f", "given no facts"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path: Path, code: str, name: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=told):
        load_method(f"./bad.py:{name}", tmp_path)


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x.py:f", "./nul\0.py:f", ".:f", "./folder.py:f"])
def test_a_path_that_cannot_be_one_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read|no file reference"):
        load_method(name, tmp_path)


@pytest.mark.parametrize("text", ["./a.py", "a.py:", "./a.py:f g", "./a.py:f.g", "./a.pyc:f"])
def test_what_looks_like_a_file_but_names_nothing_in_it_says_how_to(text: str) -> None:
    for find in (CODECS.build, METHODS.find, find_target):
        with pytest.raises(ConfigError, match=r"no file reference[\s\S]*FILE\.py:NAME"):
            find(text)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def f():\n    return 1 / 0\n", r"bad\.py, line 2\n.*ZeroDivisionError"),
        ("import sys\ndef f():\n    sys.exit()\n", r"bad\.py, line 3\n.*SystemExit"),
        ("def f(x: 'Nope' = 1):\n    pass\n", r"bad\.py:f\n.*NameError"),
        ("class Q: pass\ndef f(x: Q = None):\n    pass\n", 'option "x" has a type that no experiment file can hold'),
        ("def f(*args, **options):\n    pass\n", r"does not make a method[\s\S]*bad\.py:f"),
        (
            METHOD + "def f():\n    return mymethod().with_parts(codec='int8')\n",
            r"codec = 'int8': a Codec\n.*bad\.py:f",
        ),
    ],
)
def test_a_function_that_makes_no_method_is_told_with_its_place(tmp_path: Path, code: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    entry = load_method("./bad.py:f", tmp_path)
    with pytest.raises(ConfigError, match=told):
        METHODS.build("./bad.py:f", {})
    assert entry.facts.paper == "not stated"  # listing it is no error


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"planner": "all"}, "planner = 'all': a Planner"),
        ({"aggregator": HoldersMean}, "an Aggregator, not its class"),
        ({"send": "gradient"}, "send = 'gradient': 'delta' or 'weights'"),
        ({"topology": "ring"}, "topology"),
        ({"head": "nope"}, "head"),
        ({"adapters": frozenset()}, "adapters = .*: some of lora"),
        ({"adapters": frozenset({"qlora"})}, "qlora"),
        ({"open_choices": frozenset({"nope"})}, "open_choices"),
        ({"scaling": float("nan")}, "scaling = nan: a number above 0"),
        ({"scaling": True}, "scaling"),
        ({"pairs": None}, "PairRule"),
    ],
)
def test_values_that_make_no_method_are_refused_at_once(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        METHODS.build("fedavg", {}).with_parts(**parts)


def test_a_rule_for_pairs_names_kinds_that_exist() -> None:
    for wrong in (
        {"trained": ()},
        {"trained": (("lora_C",),)},
        {"local": ("B",)},
        {"start": "zeros"},
        {"slices": "odd"},
    ):
        with pytest.raises(ConfigError, match="no rule for pairs"):
            PairRule(**wrong)


def test_a_part_that_cannot_be_made_is_told_with_its_line(tmp_path: Path) -> None:
    path = codec_file(tmp_path)
    path.write_text(path.read_text() + "\n    def __post_init__(self):\n        raise OSError('no device')\n")
    load_part("codec", "./my_codec.py:Mine", tmp_path)
    with pytest.raises(ConfigError, match=r'codec "halves" cannot be made[\s\S]*line 33\n.*OSError: no device'):
        CODECS.build("halves")


@pytest.mark.parametrize("part_id", ["''", "'é'", "'two words'", "3", "None"])
def test_an_id_that_no_file_could_name_is_refused(tmp_path: Path, part_id: str) -> None:
    path = codec_file(tmp_path, decorator="@CODECS.register")
    path.write_text(path.read_text().replace('"halves"', part_id))
    with pytest.raises(ConfigError, match=r"no id that a file could name[\s\S]*my_codec\.py:Mine"):
        load_file(path)


@pytest.mark.parametrize("config", [3, None, [], True, {"id": 3}, {}])
def test_what_is_no_part_config_is_told(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs an id\n[\s\S]*got: "):
        CODECS.build({"id": "zstd", "inner": config})


def test_the_id_is_no_option_of_what_is_checked() -> None:
    with pytest.raises(ConfigError, match="The id is not one of the options"):
        find_target("int8", options={"id": "int4"})


@pytest.mark.parametrize("what", ["None", "['a'] * len(labels)", "np.zeros(3, int)", "np.full(len(labels), np.nan)"])
def test_a_partition_that_gives_no_owners_is_told(tmp_path: Path, what: str) -> None:
    (tmp_path / "odd.py").write_text(
        f"import numpy as np\ndef deal(config, labels, num_clients, rng):\n    return {what}\n"
    )
    name = "./odd.py:deal"
    load_plugins(spec(simulation={"partition": {"kind": name}}), tmp_path)
    with pytest.raises(DataError, match="does not give every example to a client"):
        partition(PartitionConfig(kind=name), np.arange(9) % 2, None, 3, seed=0)


def test_a_source_that_gives_no_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("def read(rest, folder, split):\n    return [1]\n")
    load_plugins(spec(data={"source": "./odd.py:read"}), tmp_path)
    with pytest.raises(DataError, match=r"gives no table\n.*odd\.py:read[\s\S]*\[1\]"):
        load_table(DataConfig(source="./odd.py:read"), tmp_path)


def test_a_file_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    path = codec_file(tmp_path, decorator="@CODECS.register")
    path.write_text(path.read_text() + "\nraise RuntimeError('late')\n")
    with pytest.raises(ConfigError, match="RuntimeError: late"):
        load_file(path)
    assert "halves" not in CODECS.names


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.py"):
        load_method("./nope.py:f", tmp_path)


def test_a_part_of_another_kind_is_refused(tmp_path: Path) -> None:
    codec_file(tmp_path)
    with pytest.raises(ConfigError, match="is no planner"):
        load_part("planner", "./my_codec.py:Mine", tmp_path)


def test_a_reference_that_nobody_loaded_says_so() -> None:
    for find in (CODECS.build, METHODS.find):
        with pytest.raises(ConfigError, match="has not been loaded"):
            find("./never.py:x")


def test_the_record_has_the_hash_of_every_file_and_nothing_of_ours(tmp_path: Path) -> None:
    path = codec_file(tmp_path)
    (tmp_path / "my_method.py").write_text(METHOD)
    load_method("./my_method.py:mymethod", tmp_path)
    part = load_part("codec", "./my_codec.py:Mine", tmp_path)
    method = METHODS.build("./my_method.py:mymethod", {}).with_parts(codec=part())
    assert plugin_record(method, "./my_method.py:mymethod") == {
        "method": {
            "object": "mymethod",
            "file": "my_method.py",
            "sha256": hashlib.sha256(METHOD.encode()).hexdigest(),
        },
        "codec": {
            "object": "Mine",
            "file": "my_codec.py",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
    }
    wrapped = method.with_parts(codec=CODECS.build({"id": "zstd", "inner": "halves"}))
    assert set(plugin_record(wrapped)) == {"codec.inner"}
    assert plugin_record(METHODS.build("fedavg", {}), "fedavg") == {}


def test_a_part_that_clients_could_not_find_is_refused(tmp_path: Path) -> None:
    part = load_part("codec", f"{codec_file(tmp_path)}:Mine", tmp_path)
    method = METHODS.build("fedavg", {}).with_parts(codec=part())
    check_registered(method)
    CODECS.forget(part.__module__)
    with pytest.raises(ConfigError, match=r'could not find the codec "halves"[\s\S]*CODECS\.register'):
        check_registered(method)


def test_a_file_may_hold_a_partition_and_a_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedstrata.data.table import RawTable\n"
        "import numpy as np\n"
        "def halves(config, labels, num_clients, rng):\n"
        "    return np.arange(len(labels)) * num_clients // len(labels)\n"
        "def read(rest, base_dir, split):\n"
        "    return RawTable({'text': ['a', 'b'], 'label': ['x', 'y']}, 'mine', 'made up', '0' * 64)\n"
    )
    values = {"data": {"source": "./mine.py:read"}, "simulation": {"partition": {"kind": "./mine.py:halves"}}}
    load_plugins(spec(**values), tmp_path)
    owner = PARTITIONS["./mine.py:halves"](None, np.zeros(4), 2, None)  # type: ignore[arg-type]
    assert owner.tolist() == [0, 0, 1, 1]
    record = plugin_record(METHODS.build("fedavg", {}), "fedavg", spec(**values))
    assert {key: entry["object"] for key, entry in record.items()} == {"partition": "halves", "source": "read"}
    table = load_table(DataConfig(source="./mine.py:read"), tmp_path)
    assert table.columns["label"] == ["x", "y"]


def test_a_partition_that_nobody_knows_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="should be 'iid', 'dirichlet'"):
        spec(simulation={"partition": {"kind": "idd"}})
