"""What must hold before anything is started: asked by the commands and by the flows themselves."""

from __future__ import annotations

from collections.abc import Iterator

from cells.replica.place import LayoutError
from cells.replica.planned import check_model
from cells.replica.shape import ShapeError
from configs.model import ModelSource
from configs.run import RunConfig
from flows.doctor import environment, machine, places
from flows.doctor.finding import Finding, Status, fail, ok
from storage.errors import StorageError
from storage.layout import RunLayout
from storage.objects import Store
from tasks.problems.check import check_problems
from tasks.problems.source import ProblemSourceError
from tasks.warm_start.policies import PolicyError, model_folder
from tasks.warm_start.policy_check import check_policy


class PreflightError(RuntimeError):
    """A run can't be carried here. Nothing was started and nothing is left; the text lists what is
    wrong, and what to do about each."""


def preflight(config: RunConfig, root: str, run_id: str = "", *, prefect: bool = False) -> None:
    """See in about a second that a run can start.

    Args:
        root: absolute storage root.
        run_id: of a run that exists, whose daemons may live and are adopted; else empty.
        prefect: also that a Prefect server answers or can be started, for who needs one.

    Raises:
        PreflightError: it can't.
    """
    failed = [
        finding
        for finding in findings(config, root, run_id, prefect=prefect)
        if finding.status is Status.FAIL
    ]
    if failed:
        raise PreflightError("\n".join(_told(one) for one in failed))


def findings(
    config: RunConfig, root: str, run_id: str = "", *, prefect: bool = False
) -> Iterator[Finding]:
    """What a run can't do without, the cheapest first. A warning says that it is tight."""
    yield machine.cores(config)
    yield machine.gpu(config)
    yield machine.open_files(config)
    yield environment.declared_packages()
    yield environment.engine_fits(config)
    yield environment.libraries()
    yield from environment.programs(config)
    yield environment.trackers(config)
    storage = list(places.storage(root))
    yield from storage
    if all(finding.status is not Status.FAIL for finding in storage):
        yield from places.far_core(config, root)
        yield places.disk(config, root)
    yield places.gateway_port(config, root, run_id)
    if prefect:
        yield places.prefect_port(config)
    yield layout(config, root, run_id)
    yield policy(config, root, run_id)
    yield problems(config)


def _told(finding: Finding) -> str:
    advice = f"\n  {finding.advice}" if finding.advice else ""
    return f"{finding.check}: {finding.found}{advice}"


def layout(config: RunConfig, root: str, run_id: str = "") -> Finding:
    """Whether the ranks of a cell can share the model, on the device of the run."""
    ranks = config.cells.layout.ranks
    if run_id and _imported(root, run_id):
        return ok("layout", f"{ranks} ranks a cell, checked when the run was started")
    try:
        check_model(config)
    except (LayoutError, ShapeError) as error:
        return fail("layout", str(error))
    return ok("layout", f"{ranks} {'rank' if ranks == 1 else 'ranks'} a cell")


def policy(config: RunConfig, root: str, run_id: str = "") -> Finding:
    """Whether the model can be trained and served; a run that has started has it in storage."""
    if config.model.source is not ModelSource.HF_DIRECTORY:
        return ok("policy", "made by the warm start")
    folder = model_folder(config)
    if run_id and _imported(root, run_id):
        return ok("policy", f"{folder}, copied when the run was started")
    try:
        check_policy(folder, config.model)
    except PolicyError as error:
        return fail("policy", str(error))
    return ok("policy", f"{folder}: weights, config and tokenizer fit each other")


def problems(config: RunConfig) -> Finding:
    """Whether the problems can be loaded, and fit the model."""
    try:
        return ok("problems", check_problems(config))
    except ProblemSourceError as error:
        return fail("problems", str(error))


def _imported(root: str, run_id: str) -> bool:
    try:
        return Store(root).exists(RunLayout(run_id).first_policy)
    except StorageError:
        return False
