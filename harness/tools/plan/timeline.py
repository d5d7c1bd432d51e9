"""Simulate a pipeline schedule: start and end of every pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice

from harness.tools.plan.plan import Action


def simulate(
    order: list[list[Action]], seconds: Callable[[Action], float], send_seconds: float
) -> list[list[Action]]:
    """Compute the times of every pass: it starts when its rank is free and its inputs have arrived.

    For each microbatch, a forward pass needs the forward of the previous stage; a backward pass its own
    forward, and the backward (for inputs) of the next stage; a backward for weights the one for inputs.
    Between ranks, inputs arrive ``send_seconds`` later.

    Args:
        order: passes of each rank, in order.
        seconds: duration of a pass.
        send_seconds: time to send a microbatch's activations to the next stage.

    Raises:
        ValueError: the order cannot run: ranks wait for each other.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last = max(rank_of)
    # Seconds from the end of a pass to its output's arrival at the next stage, by the first of both stages.
    hop = {at: 0.0 if rank_of[at] == rank_of[at + 1] else send_seconds for at in range(last)}
    # When inputs, own forwards, gradients and backwards for inputs are there, by stage and microbatch.
    inputs: dict[tuple[int, int], float] = {}
    own: dict[tuple[int, int], float] = {}
    gradients: dict[tuple[int, int], float] = {}
    halves: dict[tuple[int, int], float] = {}
    timed: list[list[Action]] = [[] for _ in order]
    remaining = sum(map(len, order))
    while remaining:
        before = remaining
        for actions, done in zip(order, timed, strict=True):
            clock = done[-1].end if done else 0.0
            for action in islice(actions, len(done), None):
                stage, kind, microbatch = action.stage, action.kind, action.microbatch
                at = (stage, microbatch)
                if kind == "F":
                    ready = inputs.get(at) if stage else 0.0
                elif kind == "W":
                    ready = halves.get(at)
                elif at not in own:
                    ready = None
                else:
                    ready = gradients.get(at) if stage < last else own[at]
                if ready is None:
                    break
                start = max(clock, ready)
                clock = start + seconds(action)
                done.append(Action(stage, kind, microbatch, start, clock))
                remaining -= 1
                if kind == "F":
                    own[at] = clock
                    if stage < last:
                        inputs[stage + 1, microbatch] = clock + hop[stage]
                elif kind != "W":
                    halves[at] = clock
                    if stage:
                        gradients[stage - 1, microbatch] = clock + hop[stage - 1]
        if remaining == before:
            raise ValueError("the schedule deadlocks")
    return timed


def sends_of_ranks(order: list[list[Action]]) -> list[int]:
    """Count the activations and gradients that each pipeline rank sends to other ranks.

    Gradients of weights are not sent, and neither are activations between two stages of one rank.
    """
    passes = [Counter((action.stage, action.kind) for action in actions) for actions in order]
    rank_of = {stage: rank for rank, counts in enumerate(passes) for stage, _ in counts}
    steps = {"F": 1, "B": -1, "I": -1}
    return [
        sum(
            count
            for (stage, kind), count in counts.items()
            if kind in steps and rank_of.get(stage + steps[kind], rank) != rank
        )
        for rank, counts in enumerate(passes)
    ]
