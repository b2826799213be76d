"""A JobSpec from a client, as the controller takes it."""

from __future__ import annotations

from atoll.controller.jobs.records.offline_profile import offline_profile
from atoll.errors import BadInput
from atoll.jobs import job_spec
from atoll.v1 import common_pb2 as pb


def spec_from_wire(wire: pb.JobSpec) -> job_spec.JobSpec:
    """The validated spec. Raises BadInput naming the first field that is wrong."""
    spec = job_spec.from_wire(wire)
    if spec.adapt.profile:
        try:
            offline_profile(spec.adapt.profile)
        except BadInput as error:
            raise BadInput(f"spec.adapt.profile: {error}") from error
    return spec
