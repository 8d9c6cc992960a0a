"""The deployments: the file for Prefect's own command says the same as ours, forms have bounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import find_placeholders

from flows.deploy import DEPLOYED, ENVIRONMENT, TAG
from flows.server import CELLS_QUEUE

FILE = Path(__file__).parents[2] / "prefect.yaml"


def test_prefect_yaml_makes_the_same_deployments() -> None:
    found = {one["name"]: one for one in yaml.safe_load(FILE.read_text())["deployments"]}
    assert found.keys() == DEPLOYED.keys()
    for name, ours in DEPLOYED.items():
        theirs = found[name]
        assert theirs["entrypoint"] == f"{ours.flow.__module__}.{ours.flow.fn.__name__}"
        assert theirs["tags"] == [TAG, ours.tag]
        assert theirs["work_pool"]["work_queue_name"] == ours.queue
        assert theirs["work_pool"]["job_variables"]["env"] == ENVIRONMENT


def test_all_that_takes_cells_waits_in_one_queue() -> None:
    assert [name for name, one in DEPLOYED.items() if one.queue != CELLS_QUEUE] == ["sweep"]


@pytest.mark.parametrize("name", sorted(DEPLOYED))
def test_every_input_of_a_form_says_what_it_is(name: str) -> None:
    schema = parameter_schema(DEPLOYED[name].flow).model_dump()
    for key, field in schema["properties"].items():
        assert field.get("description"), f"{name}.{key}"


def test_a_training_is_started_from_a_form() -> None:
    schema = parameter_schema(DEPLOYED["train"].flow).model_dump()
    assert schema["definitions"]["Preset"]["enum"]
    assert schema["definitions"]["OfTraining"]["properties"]["steps"]["minimum"] == 1
    assert not schema.get("required")


def test_the_template_of_a_kubernetes_pool_is_whole() -> None:
    """Each place that it leaves open is a variable, and what Prefect fills in itself is there."""
    template = json.loads((FILE.parent / "docs" / "kubernetes.json").read_text())
    variables = template["variables"]["properties"]
    places = {
        place.name
        for text in re.findall(r'"[^"]*{{[^"]*"', json.dumps(template["job_configuration"]))
        for place in find_placeholders(text)
    }
    assert places == set(variables)
    assert {"name", "command", "env", "labels"} <= places
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    # Without these, at this odd place, Prefect's worker refuses a manifest.
    assert (pod["parallelism"], pod["completions"]) == (1, 1)
