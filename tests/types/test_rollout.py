"""The rollout batch: its columns by hand, and that no operation mixes up rows."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.types import Rollout, Sample, Scores, rollout_from_plain, rollout_to_plain
from lightning_agentrl.types.rollout import EPISODES_PER_ENV
from tests.types.samples import action, growing, prompt, turn, windowed

T, F = True, False


def scored(rollout: Rollout) -> Rollout:
    """Every optional field filled with numbers that tell row and column."""
    place = torch.arange(len(rollout))[:, None] * 100.0 + torch.arange(rollout.action_mask.shape[1])
    columns = {f.name: torch.where(rollout.action_mask, place + k, 0.0) for k, f in enumerate(fields(Scores))}
    return rollout.union(
        scores=Scores(**columns),
        shaped_rewards=columns["values"] * 2,
        advantages=columns["values"] * 3,
        returns=columns["values"] * 4,
        bootstrap_values=torch.arange(len(rollout)) * 7.0,
    )


def tensors(rollout: Rollout) -> dict[str, torch.Tensor]:
    own = {f.name: getattr(rollout, f.name) for f in fields(Rollout)}
    own |= {f"scores.{f.name}": getattr(rollout.scores, f.name) for f in fields(Scores)}
    return {name: x for name, x in own.items() if isinstance(x, torch.Tensor)}


def assert_same(a: Rollout, b: Rollout) -> None:
    assert a.samples == b.samples
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert x.dtype == theirs[name].dtype, name
        assert torch.equal(x, theirs[name]), name


def test_columns_of_windowed_samples():
    rollout = Rollout.from_samples(windowed())
    assert rollout.action_mask.tolist() == [[T, T, F, F], [T, F, F, F], [T, T, T, T], [T, T, F, F]]
    assert rollout.turn_ids.tolist() == [[4, 4, -1, -1], [5, -1, -1, -1], [0, 0, 0, 0], [7, 7, -1, -1]]
    rewards = [[0, -0.1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0.5, 0, 0]]
    logps = [[-1.1, -1.2, 0, 0], [-1.3, 0, 0, 0], [-1.4, -1.5, -1.6, -1.7], [-1.8, -1.9, 0, 0]]
    torch.testing.assert_close(rollout.rewards, torch.tensor(rewards))
    torch.testing.assert_close(rollout.rollout_logps, torch.tensor(logps))
    assert rollout.episode.tolist() == [EPISODES_PER_ENV + 3, EPISODES_PER_ENV + 3, EPISODES_PER_ENV + 4, 0]
    assert rollout.terminated.tolist() == [F, T, F, F]
    assert rollout.last_of_episode.tolist() == [F, T, T, T]
    assert (len(rollout), len(rollout.turns)) == (4, 4)


def test_columns_of_growing_samples_leave_observations_out():
    rollout = Rollout.from_samples(growing())
    assert rollout.action_mask.tolist() == [[T] * 5, [T, F, F, F, F]]
    assert rollout.turn_ids.tolist() == [[0, 0, 1, 2, 2], [0, -1, -1, -1, -1]]
    assert rollout.rewards.tolist() == [[0, 0.5, 0, 0, 2], [-1, 0, 0, 0, 0]]
    torch.testing.assert_close(rollout.rollout_logps[0], torch.tensor([-1.1, -1.2, -1.3, -1.4, -1.5]))
    assert [turn.index for turn in rollout.turns] == [0, 1, 2, 0]


def test_a_rollout_of_nothing():
    rollout = Rollout.from_samples([])
    assert len(rollout) == 0
    assert rollout.action_mask.shape == (0, 0)
    assert rollout.last_of_episode.tolist() == []
    assert_same(rollout.select([]), rollout)
    ended = Rollout.from_samples(windowed())
    assert_same(Rollout.concat([rollout, replace(ended, groups=ended.episode)]), replace(ended, groups=ended.episode))


def test_no_two_episodes_share_a_label():
    """Whatever their environments, and however long a run."""
    places = [(env, episode) for env in (0, 1, 2, 10**6) for episode in (0, 1, 2, 3, 2**31)]
    samples = [Sample((prompt(1), action(2)), (turn(env=env, episode=episode),)) for env, episode in places]
    assert len(Rollout.from_samples(samples).episode.unique()) == len(places)


def test_all_action_tokens_are_trained_but_those_that_were_rejected():
    rollout = Rollout.from_samples(windowed())
    assert torch.equal(rollout.trained_mask, rollout.action_mask)
    kept = rollout.action_mask & (rollout.turn_ids != 5)
    assert torch.equal(rollout.union(loss_mask=kept).trained_mask, kept)


def test_select_takes_rows_in_order_and_drops_empty_columns():
    rollout = scored(Rollout.from_samples(windowed()))
    part = rollout.select([3, 1])
    assert part.samples == (rollout.samples[3], rollout.samples[1])
    for name, x in tensors(part).items():
        whole = tensors(rollout)[name][[3, 1]]
        assert torch.equal(x, whole if x.dim() == 1 else whole[:, :2]), name
    assert_same(rollout.select(torch.tensor([3, 1])), part)
    assert rollout.select([2, 2]).samples == (rollout.samples[2],) * 2


def test_select_by_mask():
    rollout = scored(Rollout.from_samples(windowed()))
    assert_same(rollout.select(rollout.last_of_episode), rollout.select([1, 2, 3]))
    assert_same(rollout.select([False, True, False, False]), rollout.select([1]))
    with pytest.raises(ValueError, match="mask of 2 rows does not fit a rollout of 4"):
        rollout.select([True, False])


@given(st.permutations(range(4)), st.integers(1, 6))
def test_to_select_pieces_and_join_them_is_nothing(order, count):
    rollout = scored(Rollout.from_samples(windowed())).select(order)
    pieces = [rollout.select(piece) for piece in torch.arange(len(rollout)).tensor_split(count)]
    assert_same(Rollout.concat(pieces), rollout)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_chunks_are_even_and_join_again(n: int) -> None:
    rollout = scored(Rollout.from_samples([*windowed(), *growing()]))
    rollout = rollout if n <= len(rollout) else Rollout.concat([rollout] * n)
    parts = rollout.chunk(n)
    sizes = [len(part) for part in parts]
    assert len(parts) == n
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert_same(Rollout.concat(parts), rollout)
    with pytest.raises(ValueError, match=f"of {len(rollout)} rows cannot be cut into {len(rollout) + 1} parts"):
        rollout.chunk(len(rollout) + 1)


def test_fields_keep_what_is_named_and_what_samples_give() -> None:
    rollout = scored(Rollout.from_samples(windowed()))
    own = tensors(Rollout.from_samples(windowed()))
    kept = rollout.fields("values", "advantages")
    assert tensors(kept).keys() == own.keys() | {"scores.values", "advantages"}
    assert torch.equal(kept.scores.values, rollout.scores.values)
    assert tensors(rollout.fields()).keys() == own.keys()
    with pytest.raises(ValueError, match="has no 'picked'; it has action_mask"):
        rollout.fields("picked")


def test_a_dict_and_back_is_the_rollout() -> None:
    rollout = scored(Rollout.from_samples([*windowed(), *growing()]))
    assert_same(Rollout.from_dict(rollout.to_dict()), rollout)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda given: given.update(values=given["values"][:, :-1]), "values has the shape"),
        (lambda given: given.update(episode=given["episode"][:-1]), "episode has the shape"),
        (lambda given: given.update(rewards=given["rewards"].sum(1)), "rewards has the shape"),
        (lambda given: given.update(action_mask=given["action_mask"][:-1]), "action_mask has the shape"),
        (lambda given: given.update(value=given["values"]), "a rollout has no field 'value'"),
        (lambda given: given.pop("turn_ids"), "needs 'turn_ids'"),
    ],
)
def test_a_dict_of_other_shapes_is_refused(change, sentence):
    given = scored(Rollout.from_samples(windowed())).to_dict()
    change(given)
    with pytest.raises(ValueError, match=sentence):
        Rollout.from_dict(given)


def test_concat_of_other_widths_keeps_common_fields_only():
    a, b = scored(Rollout.from_samples(windowed())), Rollout.from_samples(growing())
    b = b.union(scores=Scores(values=torch.ones(2, 5)), returns=torch.ones(2, 5))
    both = Rollout.concat([a, b])
    assert both.action_mask.shape == (6, 5)
    assert_same(both.select([0, 1, 2, 3]), Rollout(**_only_common(a)))
    assert both.turn_ids[0].tolist() == [4, 4, -1, -1, -1]
    assert both.scores.old_logps is None
    assert both.advantages is None
    assert both.bootstrap_values is None
    assert both.returns is not None
    assert both.returns[4:].tolist() == [[1.0] * 5] * 2


def _only_common(a: Rollout) -> dict:
    kept = ("action_mask", "turn_ids", "rewards", "rollout_logps", "episode", "terminated", "returns")
    return {name: getattr(a, name) for name in kept} | {
        "samples": a.samples,
        "scores": Scores(values=a.scores.values),
    }


def test_union_merges_scores_field_by_field():
    rollout = Rollout.from_samples(growing())
    values, logps = torch.ones(2, 5), torch.zeros(2, 5)
    one = rollout.union(scores=Scores(values=values))
    two = one.union(scores=Scores(old_logps=logps, values=values * 2), advantages=logps)
    assert two.scores.old_logps is logps
    assert torch.equal(two.scores.values, values * 2)
    assert one.scores.old_logps is None
    assert torch.equal(one.scores.values, values)
    assert rollout.scores == Scores()
    assert (rollout.scored, one.scored, two.scored) == (False, True, True)
    assert two.advantages is logps
    with pytest.raises(TypeError, match="no_such_field"):
        rollout.union(no_such_field=values)


@pytest.mark.parametrize("shape", [(2, 4), (5, 2), (2,), (2, 5, 1)])
def test_union_refuses_a_tensor_of_another_shape(shape):
    rollout, x = Rollout.from_samples(growing()), torch.zeros(shape)
    for fields_given in ({"advantages": x}, {"scores": Scores(values=x)}, {"loss_mask": x.bool()}):
        with pytest.raises(ValueError, match=r"this rollout needs \[2, 5\]"):
            rollout.union(**fields_given)
    with pytest.raises(ValueError, match=r"this rollout needs \[2\]"):
        rollout.union(greedy_scores=torch.zeros(2, 5))


def test_to_moves_every_tensor():
    rollout = scored(Rollout.from_samples(windowed()))
    assert {x.device.type for x in tensors(rollout.to("meta")).values()} == {"meta"}
    assert len(tensors(rollout)) == len(tensors(rollout.to("meta"))) == 15
    assert rollout.to("meta").samples is rollout.samples


@given(st.permutations(range(7)))
def test_last_of_episode_does_not_depend_on_row_order(order):
    places = [(0, 0, 2), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 5), (1, 0, 4), (2, 9, 0)]  # env, episode, turn
    samples = [Sample((prompt(1), action(2)), (turn(env=e, episode=p, index=i),)) for e, p, i in places]
    rollout = Rollout.from_samples([samples[i] for i in order])
    last = {places[i] for i, flag in zip(order, rollout.last_of_episode.tolist(), strict=True) if flag}
    assert last == {(0, 0, 2), (0, 1, 0), (1, 0, 5), (2, 9, 0)}


@pytest.mark.parametrize("samples", [windowed, growing])
@pytest.mark.parametrize("fill", [scored, lambda rollout: rollout])
def test_plain_types_survive_a_safe_checkpoint(tmp_path, samples, fill):
    rollout = fill(Rollout.from_samples(samples()))
    torch.save(rollout_to_plain(rollout), tmp_path / "rollout.pt")
    assert_same(rollout_from_plain(torch.load(tmp_path / "rollout.pt", weights_only=True)), rollout)


def test_a_checkpoint_holds_no_pictures_that_are_for_people_only():
    rollout = Rollout.from_samples([Sample((prompt(1), action(2)), (turn(image=b"PNG"),))])
    assert rollout_from_plain(rollout_to_plain(rollout)).turns == (replace(rollout.turns[0], image=None),)


# Groups


def grouped() -> Rollout:
    """The windowed samples, those of an episode in one group, with a greedy score for each row."""
    label = {(1, 3): 7, (1, 4): -2, (0, 0): 7}
    samples = [replace(s, turns=tuple(replace(t, group=label[t.env, t.episode]) for t in s.turns)) for s in windowed()]
    return Rollout.from_samples(samples).union(greedy_scores=torch.tensor([0.5, 0.5, 1.0, 0.25]))


def test_groups_are_those_of_the_turns_and_travel_with_their_rows():
    rollout = grouped()
    assert rollout.groups is not None
    assert rollout.groups.tolist() == [7, 7, -2, 7]
    picked = rollout.select([2, 0]).to("cpu")
    assert picked.groups.tolist() == [-2, 7]
    assert picked.greedy_scores.tolist() == [1.0, 0.5]
    joined = Rollout.concat([picked, rollout])
    assert joined.groups.tolist() == [-2, 7, 7, 7, -2, 7]
    assert joined.greedy_scores.tolist() == [1.0, 0.5, 0.5, 0.5, 1.0, 0.25]
    again = rollout_from_plain(rollout_to_plain(rollout))
    assert again.groups.tolist() == [7, 7, -2, 7]
    assert again.greedy_scores.tolist() == [0.5, 0.5, 1.0, 0.25]
    assert [turn.group for turn in again.turns] == [7, 7, -2, 7]


def test_samples_without_groups_have_none_and_a_rank_without_samples_stands_in_no_ones_way():
    assert Rollout.from_samples(windowed()).groups is None
    assert Rollout.concat([grouped(), Rollout.from_samples(windowed())]).groups is None
    assert Rollout.from_samples([]).groups.tolist() == []
    assert Rollout.concat([Rollout.from_samples([]), grouped()]).groups.tolist() == [7, 7, -2, 7]
