"""The experiment file: every mistake at once, with its place and the likely fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.errors import ConfigError
from fedstrata.experiment.load import check_spec, json_schema, load_spec, resolved
from fedstrata.experiment.quickstart import quickstart_path
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.store import resume_hash, spec_difference, spec_hash

Tiny = Callable[..., dict[str, Any]]


def problems(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_spec(values, where="here")
    return "\n".join(caught.value.problems)


def test_an_empty_file_is_an_experiment() -> None:
    assert check_spec({}, where="here") == ExperimentSpec()


def test_the_packaged_quick_start_is_read_without_complaint() -> None:
    spec, base = load_spec(quickstart_path())
    assert spec.name == "quickstart"
    assert base == quickstart_path().parent


def test_all_unknown_keys_are_named_at_once_with_the_nearest_known_one() -> None:
    found = problems({"roundz": {}, "rounds": {"cuont": 3}, "train": {"learning_rat": 1}})
    assert 'roundz: unknown key; did you mean "rounds"?' in found
    assert 'rounds.cuont: unknown key; did you mean "count"?' in found
    assert 'train.learning_rat: unknown key; did you mean "learning_rate"?' in found


def test_wrong_values_are_named_with_what_was_given() -> None:
    found = problems({"rounds": {"count": 0}, "train": {"batch_size": "many"}})
    assert "rounds.count: must be greater than or equal to 1 (got 0)" in found
    assert "train.batch_size" in found
    assert "(got 'many')" in found


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"train": {"local_steps": 1, "local_epochs": 1}}, "train.local_steps and train.local_epochs are both set"),
        ({"adapter": {"kind": "full", "max_rank": 4}}, "adapter.max_rank is set"),
        ({"simulation": {"partition": {"kind": "iid", "alpha": 0.1}}}, 'kind = "iid" does not use it'),
        ({"rounds": {"clients_per_round": 5}}, "simulation.devices has 4 clients"),
        ({"rounds": {"clients_per_round": 2, "min_replies": 3}}, "a round invites 2 clients"),
        ({"run": {"keep": "best"}, "data": {"validation_fraction": 0}}, "nothing can be validated"),
        ({"rounds": {"patience": 1}, "data": {"validation_fraction": 0}}, "nothing can be validated"),
        ({"run": {"keep": "best"}, "eval": {"every": 9}}, "there are fewer rounds"),
        ({"adapter": {"head": "local"}}, 'set eval.on = "clients"'),
        ({"method": {"name": "fedavgg"}}, 'did you mean "fedavg"'),
        ({"method": {"name": "fedprox", "nu": 1}}, 'unknown option "nu": did you mean "mu"'),
        ({"method": {"name": "fedavg"}, "plan": "fixed"}, 'option "clients" is needed'),
        ({"method": {"name": "fedit"}, "plan": {"id": "all"}}, '[plan] is set, but method "fedit" fixes it'),
        ({"method": {"name": "fedit"}, "adapter": {"kind": "full"}}, 'adapter.kind = "lora"'),
        ({"codec": {"uplink": "int7"}}, 'did you mean "int'),
        ({"codec": {"uplink": {"id": "int8", "blok": 1}}}, 'did you mean "block"'),
        ({"codec": {"uplink": "top_k", "send": "weights"}}, "differences only"),
        ({"codec": {"downlink": {"id": "int8", "rounding": "stochastic"}}}, "both sides agree on"),
        ({"method": {"name": "local_only"}, "run": {"keep": "best"}}, "a model of its own"),
        ({"simulation": {"devices": {}}}, "at least one client"),
    ],
)
def test_a_contradiction_is_an_error_and_never_ignored(values: dict[str, Any], said: str) -> None:
    assert said in problems(values)


def test_contradictions_are_reported_together() -> None:
    found = problems({"train": {"local_steps": 1, "local_epochs": 1}, "rounds": {"clients_per_round": 9}})
    assert len(found.splitlines()) == 2


def test_overrides_take_toml_values_and_bare_words(world: Path, tiny: Tiny) -> None:
    path = world / "e.toml"
    path.write_text(tomli_w.dumps(tiny()))
    spec, _ = load_spec(path, ["rounds.count=7", "method.name=fedprox", "method.mu=0.5", "train.clip_norm=none"])
    assert (spec.rounds.count, spec.method.name, spec.method.options) == (7, "fedprox", {"mu": 0.5})
    assert spec.train.clip_norm is None


def test_an_override_without_an_equals_sign_is_refused(world: Path, tiny: Tiny) -> None:
    (world / "e.toml").write_text(tomli_w.dumps(tiny()))
    with pytest.raises(ConfigError, match=r"--set table\.key=value"):
        load_spec(world / "e.toml", ["rounds.count"])


def test_broken_toml_is_named_with_its_line(world: Path) -> None:
    (world / "e.toml").write_text("[rounds]\ncount = = 3\n")
    with pytest.raises(ConfigError, match="line 2"):
        load_spec(world / "e.toml")


def test_a_missing_file_names_the_commands_that_make_one(world: Path) -> None:
    with pytest.raises(ConfigError, match="fedstrata init"):
        load_spec(world / "nothing.toml")


def test_the_resolved_spec_reads_back_as_the_same_spec(tiny: Tiny) -> None:
    spec = check_spec(tiny(), where="here")
    assert ExperimentSpec.model_validate(json.loads(json.dumps(resolved(spec)))) == spec


def test_the_hash_ignores_the_name_and_sees_everything_else(tiny: Tiny) -> None:
    one = resolved(check_spec(tiny(), where="here"))
    renamed = resolved(check_spec(tiny(name="other"), where="here"))
    seeded = resolved(check_spec(tiny(run__seed=1), where="here"))
    assert spec_hash(one) == spec_hash(renamed) != spec_hash(seeded)
    assert spec_difference(one, renamed) == []
    assert spec_difference(one, seeded) == ["run.seed: 0 -> 1"]


def test_more_rounds_continue_a_run_unless_the_learning_rate_depends_on_them(tiny: Tiny) -> None:
    def pair(**changes: Any) -> tuple[str, str]:
        short, long = (resolved(check_spec(tiny(rounds__count=n, **changes), where="here")) for n in (3, 9))
        return resume_hash(short), resume_hash(long)

    constant, cosine = pair(), pair(train__schedule="cosine")
    assert constant[0] == constant[1]
    assert cosine[0] != cosine[1]


def test_the_schema_describes_every_table() -> None:
    schema = json_schema()
    assert set(ExperimentSpec.model_fields) == set(schema["properties"])
    assert schema["additionalProperties"] is False


FLEET = {"simulation": {"devices": {"laptop-16gb": 2, "jetson-nx": 2}}}


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ({"method": {"name": "fedit"}, "plan": {"id": "client_ranks", "ranks": {"laptop-16gb": 2}}}, "unequal ranks"),
        ({"method": {"name": "ffa_lora"}, "plan": {"id": "last_k", "k": 1}}, "unequal depth"),
        ({"method": {"name": "fedavg"}, "plan": {"id": "client_ranks", "ranks": {"a": 2, "b": 1}}}, "unequal ranks"),
        ({"method": {"name": "fedavg"}, "plan": "client_ranks", **FLEET}, "unequal ranks"),
        ({"method": {"name": "fedtlu"}, "plan": "client_ranks", **FLEET}, "unequal ranks"),
        ({"method": {"name": "fedavg"}, "objective": "rank_decay"}, "unequal ranks"),
        ({"method": {"name": "local_only"}, "run": {"keep": "best"}}, "personalised"),
    ],
)
def test_a_refused_setting_names_the_column_that_says_no(values: dict[str, Any], column: str) -> None:
    with pytest.raises(ConfigError, match=f'column "{column}"'):
        load_spec(values)


@pytest.mark.parametrize(
    "values",
    [
        {"plan": "client_ranks", "aggregate": "rank_slice_mean", **FLEET},
        {"plan": {"id": "client_ranks", "ranks": {"a": 2, "b": 2}}},
        {"plan": "client_ranks", "simulation": {"devices": {"laptop-16gb": 3}}},
        {"objective": "rank_decay", "aggregate": "norm_weighted_pad"},
        {"plan": "client_ranks", "adapter": {"kind": "full"}, **FLEET},
    ],
)
def test_unequal_ranks_are_allowed_where_the_mean_takes_them_or_there_are_none(values: dict[str, Any]) -> None:
    load_spec({"method": {"name": "fedavg"}, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": {"name": "flora"}, "codec": {"uplink": {"id": "error_feedback", "inner": "int8"}}}, "left unsent"),
        (
            {
                "method": {"name": "fedsvd"},
                "codec": {"uplink": {"id": "zstd", "inner": {"id": "error_feedback", "inner": "int8"}}},
            },
            "left unsent|zstd",
        ),
        ({"method": {"name": "fedavg"}, "plan": "after_gradient"}, "square"),
        ({"method": {"name": "fedavg"}, "plan": {"id": "hello", "importance": "updates"}}, "moments"),
    ],
)
def test_parts_that_would_give_wrong_results_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(values)
