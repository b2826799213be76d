"""plans: what was decided, with the input it was decided from."""

from __future__ import annotations

import json

from scripted_controller import ScriptedController
from shown_job import atoll
from typer.testing import CliRunner

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

PLACEMENT = pb.DecidedPlacement(reason="a + b", input='{"machines":[]}', output="{}")
PLAN = pb.DecidedPlan(plan=common.Plan(id=1, planner="even", reason="the same for all"), input="{}", output="{}")


def test_a_placement_stands_before_the_plans_and_has_a_name(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-3f9a")
    controller.script.plans = pb.PlansReply(plans=[PLAN], placement=PLACEMENT)
    _, out, _ = atoll(runner, controller, "plans", "vit-3f9a")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["placement", "1"]
    document = json.loads(atoll(runner, controller, "plans", "vit-3f9a", "--json")[1])
    assert (document["placement"]["reason"], [one["plan"]["id"] for one in document["plans"]]) == ("a + b", [1])
    assert atoll(runner, controller, "plans", "vit-3f9a", "--input", "placement")[1].strip() == PLACEMENT.input
