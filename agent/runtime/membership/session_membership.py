"""The membership that a session names: its view, place, group, members, keys and holders of replicas."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.membership.membership_view import MembershipView
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.process_groups import Group
from atoll.v1 import agents_pb2

VIEW_VARIABLE: Final = "ATOLL_VIEW"
"""Environment variable with the view that this process is in, beside those of torchrun; without it, the first view."""


def enter_membership(session: Session, view: MembershipView, place: WorkerPlace, group: Group | None) -> None:
    """Make the session's membership that of the view, in which this worker has `place`."""
    session.view, session.place, session.group = view.number, place, group
    os.environ[VIEW_VARIABLE] = str(view.number)
    session.members = view.members
    if session.keys is not None:
        keys = session.keys
        session.keys = agents_pb2.DataKeys(secret=keys.secret, volunteers=keys.volunteers, public=view.keys)
    if session.memory is not None:
        session.memory = replace(
            session.memory,
            nodes=tuple(member.node for member in view.members),
            kept_by=tuple(tuple(member.holders) for member in view.members),
        )
    if session.link is not None:
        session.link.outbox.begin_view(view.number, session.link.id)


def return_to_membership(session: Session, before: Session) -> None:
    """Make the session's membership that of an earlier view again."""
    for name in ("view", "place", "group", "members", "keys", "memory", "strategy", "plans_of_another", "refusal"):
        setattr(session, name, getattr(before, name))
