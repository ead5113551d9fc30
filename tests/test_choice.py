"""Problems with implementations: selections, the relaxation, and the referee."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import laws

from remat.policies.exact.cut import cut_bound
from remat.policies.solvers.choice import Choice, ChoiceProblem, replay_choices
from remat.policies.solvers.problem import replay


@st.composite
def choice_problems(draw: st.DrawFn, most: int = 6, several: int = 3) -> ChoiceProblem:
    """Any structure: implementations that read different nodes, optional nodes, in place, workspace, a turn."""
    count = draw(st.integers(2, most))
    numbers = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    sizes = draw(numbers)
    choices: list[list[Choice]] = []
    with_several = draw(st.sets(st.integers(0, count - 1), max_size=several))
    for node in range(count):
        ways = draw(st.integers(2, 3)) if node in with_several else 1
        inputs = (
            st.sets(st.integers(0, node - 1), max_size=min(node, 3)) if node else st.just(set())
        )
        choices.append(
            [
                Choice(
                    draw(st.integers(0, 5)),
                    tuple(sorted(draw(inputs))),
                    draw(st.sampled_from([0, 0, 1, 3])),
                )
                for _ in range(ways)
            ]
        )
    in_place: list[int | None] = []
    for node, ways in enumerate(choices):
        reads = sorted({r for choice in ways for r in choice.inputs if sizes[r] >= sizes[node]})
        in_place.append(draw(st.sampled_from([None, *reads])))
    required = draw(flags) if draw(st.booleans()) else [True] * count
    required[-1] = True
    return ChoiceProblem.of(
        sizes,
        choices,
        repeatable=draw(flags) if draw(st.booleans()) else None,
        turn=draw(st.sampled_from([0, count // 2, count // 2, count])),
        in_place=in_place,
        required=required,
    )


def selections(problem: ChoiceProblem) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(0, len(choices) - 1) for choices in problem.choices))


def sequences(draw: st.DrawFn, problem: ChoiceProblem, selection: tuple[int, ...]) -> list[int]:
    """A valid sequence: first runs in order, repetitions after the turn anywhere."""
    active = problem.active(selection)
    order: list[int] = []
    for node in active:
        if node >= problem.turn:
            done = [i for i in active if i < node and problem.repeatable[i]]
            if done:
                order += draw(st.lists(st.sampled_from(done), max_size=3))
        order.append(node)
    return order


MASK = 3


def relu_net() -> ChoiceProblem:
    """x, relu(x), relu's mask, a layer; the backward of relu reads x, or the mask, or relu(x).

    Nodes: 0 x, 1 y = relu(x), 2 a layer of y, 3 mask of x (only choice 1 needs it), 4 gradient of 2, 5 of 1.
    """
    return ChoiceProblem.of(
        [8, 8, 8, 1, 8, 8],
        [
            [Choice(10, ())],
            [Choice(1, (0,))],
            [Choice(10, (1,))],
            [Choice(1, (0,))],
            [Choice(10, (1, 2))],
            [
                Choice(1, (0, 4)),
                Choice(1, (3, 4), sites=frozenset({"mask"})),
                Choice(1, (1, 4), 2),
            ],
        ],
        repeatable=[True] * 4 + [False] * 2,
        turn=4,
        in_place=[None, 0, None, None, None, 4],
        required=[True, True, True, False, True, True],
    )


# -- selections ---------------------------------------------------------------------------------


def test_a_node_that_is_not_required_runs_only_if_the_selection_reads_it() -> None:
    problem = relu_net()
    one, nodes = problem.select([0] * 6)
    assert nodes == (0, 1, 2, 4, 5) and MASK not in problem.active([0] * 6)
    assert one.inputs == ((), (0,), (1,), (1, 2), (0, 3))
    assert (one.turn, one.sizes.tolist(), one.costs.tolist()) == (3, [8] * 5, [10, 1, 10, 10, 1])
    masked, nodes = problem.select([0, 0, 0, 0, 0, 1])
    assert nodes == (0, 1, 2, 3, 4, 5)
    assert (masked.turn, masked.inputs[5]) == (4, (3, 4))
    output, _ = problem.select([0, 0, 0, 0, 0, 2])
    assert output.workspace is not None
    assert output.workspace.tolist() == [0, 0, 0, 0, 2]


def test_the_relaxation_has_what_all_selections_share() -> None:
    problem = relu_net()
    relaxed = problem.relaxed()
    assert problem.certain == (0, 1, 2, 4, 5)
    assert relaxed.inputs == ((), (0,), (1,), (1, 2), (3,))
    assert relaxed.total_cost == 32
    assert problem.relaxed(in_place=True).inputs == ((), (), (1,), (1, 2), ())


@laws(80)
@given(st.data())
def test_a_bound_of_the_relaxation_holds_for_every_plan(data: st.DataObject) -> None:
    problem = data.draw(choice_problems())
    selection = data.draw(selections(problem))
    sequence = data.draw(st.composite(sequences)(problem, selection))
    for in_place in (False, True):
        plan = replay_choices(problem, selection, sequence, in_place=in_place)
        relaxed = problem.relaxed(in_place=in_place)
        number = {node: index for index, node in enumerate(problem.certain)}
        inside = replay(relaxed, [number[n] for n in sequence if n in number])
        assert inside.peak_bytes <= plan.peak_bytes
        assert inside.cost <= plan.cost
        bound = relaxed.total_cost + cut_bound(relaxed, plan.peak_bytes).bound
        assert bound <= plan.cost + 1e-9


def test_a_problem_of_one_choice_is_the_problem() -> None:
    selected, nodes = relu_net().select([0] * 6)
    single = ChoiceProblem.only(selected)
    again, same = single.select([0] * len(nodes))
    assert same == tuple(range(len(nodes)))
    assert again.inputs == selected.inputs and again.turn == selected.turn
    assert np.array_equal(again.costs, selected.costs)
    assert single.relaxed().inputs == selected.inputs


# -- the referee --------------------------------------------------------------------------------


@laws(120)
@given(st.data())
def test_the_referee_agrees_with_that_of_the_selected_problem(data: st.DataObject) -> None:
    problem = data.draw(choice_problems())
    selection = data.draw(selections(problem))
    sequence = data.draw(st.composite(sequences)(problem, selection))
    selected, nodes = problem.select(selection)
    number = {node: index for index, node in enumerate(nodes)}
    ours = replay_choices(problem, selection, sequence)
    theirs = replay(selected, [number[node] for node in sequence])
    assert ours.live_bytes.tolist() == theirs.live_bytes.tolist()
    assert (ours.cost, ours.extra_cost) == (theirs.cost, theirs.extra_cost)
    # In place saves the result's bytes exactly where the overwritten copy is read for the last time.
    chosen = problem.chosen(selection)
    reused = replay_choices(problem, selection, sequence, in_place=True)
    for position, node in enumerate(sequence):
        target = problem.in_place[node]
        saved = 0
        if target is not None and target in chosen[node].inputs:
            later = sequence[position + 1 :]
            until = later.index(target) if target in later else len(later)
            if all(target not in chosen[n].inputs for n in later[:until]):
                saved = int(problem.sizes[node])
        assert ours.live_bytes[position] - reused.live_bytes[position] == saved


def test_in_place_counts_only_when_asked_and_only_if_nobody_needs_the_input() -> None:
    problem = relu_net()
    # The backward reads x: relu may not overwrite it. The gradient of relu overwrites the one it reads.
    by_input = [0] * 6
    plain = replay_choices(problem, by_input, problem.active(by_input))
    reused = replay_choices(problem, by_input, problem.active(by_input), in_place=True)
    assert plain.live_bytes.tolist() == [8, 16, 24, 32, 24]
    assert reused.live_bytes.tolist() == [8, 16, 24, 32, 16]
    by_output = [0, 0, 0, 0, 0, 2]
    active = problem.active(by_output)
    reused = replay_choices(problem, by_output, active, in_place=True)
    assert reused.live_bytes.tolist() == [8, 8, 16, 24, 16 + 2]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([0, 1, 9], "position 2: there is no node 9"),
        ([0, 1, 2, 3], "position 3: no one needs node 3"),
        ([0, 2], "position 1: node 2 reads 1, never computed"),
        ([1], "position 0: node 1 reads 0, never computed"),
        ([0, 1, 0], "position 2: node 0 runs again before the turn"),
        ([0, 1, 2, 4, 4], "position 4: node 4 may not run again"),
        ([0, 1, 2, 4], "node 5 never runs"),
    ],
)
def test_the_referee_rejects_at_the_first_broken_step(sequence: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay_choices(relu_net(), [0] * 6, sequence)


def test_first_runs_are_in_order() -> None:
    problem = ChoiceProblem.of([1, 1], [[Choice(1, ())], [Choice(1, ())]])
    with pytest.raises(ValueError, match="position 0: node 1 first runs before 0"):
        replay_choices(problem, [0, 0], [1, 0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Choice(-1, ()), "not negative"),
        (lambda: Choice(float("inf"), ()), "finite"),
        (lambda: Choice(1, (), -1), "not negative"),
        (lambda: Choice(1, (2, 1)), "ascending"),
        (lambda: ChoiceProblem.of([1], [[]]), "node 0 has no choice"),
        (lambda: ChoiceProblem.of([1, 1], [[Choice(1, ())]]), "entries for 1 nodes"),
        (lambda: ChoiceProblem.of([-1], [[Choice(1, ())]]), "negative"),
        (lambda: ChoiceProblem.of([1], [[Choice(1, (0,))]]), "smaller nodes"),
        (lambda: ChoiceProblem.of([1], [[Choice(1, ())]], turn=2), "turn=2"),
        (
            lambda: ChoiceProblem.of([1, 1], [[Choice(1, ())]] * 2, in_place=[None, 0]),
            "no choice of it reads",
        ),
        (
            lambda: ChoiceProblem.of(
                [1, 2], [[Choice(1, ())], [Choice(1, (0,))]], in_place=[None, 0]
            ),
            "at least as many",
        ),
        (lambda: relu_net().select([0] * 5), "5 entries for 6 nodes"),
        (lambda: relu_net().select([0, 0, 0, 0, 0, 3]), "choices 0 to 2"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()  # type: ignore[operator]
