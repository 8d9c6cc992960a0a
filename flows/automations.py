"""Automations that `gyre deploy` makes: what the Prefect server does by itself when something
happens."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment, SuspendFlowRun
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from flows.events import EventName

SILENCE = timedelta(minutes=5)
"""Ten heartbeats of ``gyre serve``. A run that is wrongly taken for dead would have to share its
cells: a busy machine must have its time."""
GONE_SILENT = "It sent no heartbeat any more."
"""Message of the state that such a run gets."""
_LIFE = "prefect.flow-run.heartbeat"
_ENDS = (
    "prefect.flow-run.Completed",
    "prefect.flow-run.Failed",
    "prefect.flow-run.Cancelled",
    "prefect.flow-run.Crashed",
    "prefect.flow-run.Suspended",
    "prefect.flow-run.AwaitingRetry",
)
SILENT, EVALUATE, PAUSE, PROBLEMS = (
    "gyre: a silent run is marked as crashed",
    "gyre: a finished step is evaluated",
    "gyre: a run in trouble is paused",
    "gyre: a new problem set is trained on",
)


def make_automations(
    deployments: dict[str, UUID],
    *,
    evaluate_steps: bool = False,
    pause_on_alarm: bool = False,
    train_on_problems: bool = False,
) -> list[AutomationCore]:
    """Create or renew the automations; those that a person switched in the UI stay as they are.

    Args:
        deployments: ids by flow name.
        evaluate_steps, pause_on_alarm, train_on_problems: switch the automation on. Without it, a
            new one is off.
    """
    wanted = [
        (_silent(), True),
        (_evaluate(deployments["evaluate"]), evaluate_steps),
        (_pause(), pause_on_alarm),
        (_problems(deployments["train"]), train_on_problems),
    ]
    made = []
    with get_client(sync_client=True) as client:
        for automation, switched_on in wanted:
            found = client.read_automations_by_name(automation.name)
            enabled = switched_on or (bool(found) and found[0].enabled)
            automation = automation.model_copy(update={"enabled": enabled})
            if found:
                client.update_automation(found[0].id, automation)
            else:
                client.create_automation(automation)
            made.append(automation)
    return made


def _silent() -> AutomationCore:
    """Its places in the work queue are free then; its daemons end with their lease, and so the
    cells are free as well."""
    return AutomationCore(
        name=SILENT,
        description="No heartbeat for five minutes: the process of the flow is gone.",
        trigger=EventTrigger(
            after={_LIFE},
            expect={_LIFE, *_ENDS},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.id": "prefect.tag.gyre"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message=GONE_SILENT,
                force=True,
            )
        ],
    )


def _evaluate(deployment: UUID) -> AutomationCore:
    return AutomationCore(
        name=EVALUATE,
        description="The version that a step left, on the held-out problems; it waits for cells.",
        trigger=_on(EventName.STEP_FINISHED),
        actions=[
            _run(
                deployment,
                root=_text("root"),
                run_id=_text("run_id"),
                version=_value("version"),
            )
        ],
    )


def _pause() -> AutomationCore:
    return AutomationCore(
        name=PAUSE,
        description="The held-out pass rate fell by more than noise, or a figure is beyond its "
        "warning bound in training.health. Resume in the UI goes on.",
        trigger=_on(EventName.PASS_RATE_FELL, EventName.ALARM),
        # An update sends what was set: without its type this would become one that does nothing.
        actions=[SuspendFlowRun(type="suspend-flow-run")],
    )


def _problems(deployment: UUID) -> AutomationCore:
    return AutomationCore(
        name=PROBLEMS,
        description="A folder of problem_sets in storage has a train.yaml: it is trained.",
        trigger=_on(EventName.PROBLEMS_ADDED),
        actions=[_run(deployment, root=_text("root"), config=_text("config"))],
    )


def _on(*events: EventName) -> EventTrigger:
    return EventTrigger(
        expect={event.value for event in events},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def _run(deployment: UUID, **parameters: dict[str, Any]) -> RunDeployment:
    return RunDeployment(
        source="selected", deployment_id=deployment, parameters=parameters, job_variables=None
    )


def _text(name: str) -> dict[str, Any]:
    return {"__prefect_kind": "jinja", "template": f"{{{{ event.payload.{name} }}}}"}


def _value(name: str) -> dict[str, Any]:
    """A number: a template alone always gives a text."""
    return {"__prefect_kind": "json", "value": _text(name)}
