"""The transformers engine: what it returns is what the model says, whoever else is being served."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from lightning_agentrl.engines import PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.engines.transformers.rows import LEAST_PREFIX
from lightning_agentrl.models.kernels import checkpoint_activations
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from tests.inputs import image, random_ids, text, text_row
from tests.tiny import VOCABULARY

CLOSE = 2


def request(prompt: tuple[int, ...], seed: int = 0, max_tokens: int = 6, temperature: float = 1.0) -> SamplingRequest:
    return SamplingRequest(text(*prompt), max_tokens, temperature, seed)


PREFIX = random_ids(0, 20)
MIXED = [  # shared and unshared beginnings, equal prompts, one that is a prefix of another, short and long
    request(PREFIX + random_ids(1, 4), seed=1),
    request(PREFIX + random_ids(2, 1), seed=2, max_tokens=3),
    request(PREFIX, seed=3),
    request(PREFIX, seed=4, temperature=0.5),
    request(random_ids(3, 2), seed=5),
    request(random_ids(4, 1), seed=6, max_tokens=9),
    request(PREFIX + random_ids(1, 4), seed=7, temperature=0.0),
]


@pytest.fixture
def policy(tiny_folder) -> LanguageModel:
    return LanguageModel(load_causal_lm(str(tiny_folder)).double()).train()


def gathering() -> TransformersEngine:
    """Return an engine that waits long enough to sample what is asked together in one batch."""
    engine = TransformersEngine()
    engine.gather_seconds = 0.02
    return engine


@pytest.fixture
def engine(policy) -> Iterator[TransformersEngine]:
    engine = gathering()
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    engine.sync(0)
    yield engine
    engine.stop()


def serve(engine: TransformersEngine, requests: Sequence[SamplingRequest]) -> list[Reply]:
    async def together() -> list[Reply]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), timeout=60)

    return asyncio.run(together())


@contextmanager
def batches_of(policy: LanguageModel) -> Iterator[list[tuple[int, int]]]:
    """Shapes [rows, tokens] of every forward pass."""
    shapes: list[tuple[int, int]] = []

    def note(_module, _args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    handle = policy.lm.base_model.register_forward_pre_hook(note, with_kwargs=True)
    yield shapes
    handle.remove()


@torch.no_grad()
def log_pi(policy: LanguageModel, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """[T, V] by one plain forward."""
    return (policy.lm(torch.tensor([list(ids)]), use_cache=False).logits[0] / temperature).log_softmax(-1)


def assert_same(a: Sequence[Reply], b: Sequence[Reply]) -> None:
    assert [(r.ids, r.closed) for r in a] == [(r.ids, r.closed) for r in b]
    for ours, theirs in zip(a, b, strict=True):
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-10)


def test_logps_are_those_of_the_sampled_ids(engine, policy):
    replies = serve(engine, MIXED)
    for asked, reply in zip(MIXED, replies, strict=True):
        whole = log_pi(policy, asked.prompt.ids + reply.ids, asked.temperature or 1.0)
        start = len(asked.prompt) - 1
        expected = [float(whole[start + k, token]) for k, token in enumerate(reply.ids)]
        assert reply.logps == pytest.approx(expected, abs=1e-10)
        assert 1 <= len(reply.ids) <= asked.max_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_logps_on_a_gpu_are_those_of_the_sampled_ids(served_folder, device, deterministic):
    """Its heads are wide enough for FlexAttention."""
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    policy = LanguageModel(load_causal_lm(str(served_folder))).train().to(device)
    engine = gathering()
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    try:
        engine.sync(0)
        torch.use_deterministic_algorithms(deterministic)
        replies = serve(engine, MIXED)
    finally:
        torch.use_deterministic_algorithms(False)
        engine.stop()
    policy.cpu()
    for asked, reply in zip(MIXED, replies, strict=True):
        whole = log_pi(policy, asked.prompt.ids + reply.ids, asked.temperature or 1.0)
        start = len(asked.prompt) - 1
        expected = [float(whole[start + k, token]) for k, token in enumerate(reply.ids)]
        assert reply.logps == pytest.approx(expected, abs=1e-4)


def test_replies_do_not_depend_on_company(engine, policy):
    alone = []
    for one in MIXED:
        engine.sync(0)  # forget the prefix
        alone += serve(engine, [one])
    with batches_of(policy) as shapes:
        assert_same(serve(engine, MIXED), alone)
    assert max(rows for rows, _ in shapes) == len(MIXED)
    assert_same(serve(engine, MIXED[::-1])[::-1], alone)
    for some in (MIXED[:2], MIXED[:4], MIXED[2:3], MIXED[4:], MIXED[:1]):  # after other batches, in other groups
        assert_same(serve(engine, some), [alone[MIXED.index(one)] for one in some])
    assert len({reply.ids for reply in alone}) > 4


@pytest.mark.parametrize("family", ["sliding window", "padded"])
def test_other_families(tmp_path, policy, monkeypatch, family):
    """A window that is shorter than the prompts, and models whose layers cannot read a tree."""
    if family == "sliding window":
        config = MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=9,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        policy = LanguageModel(load_causal_lm(str(tmp_path)).double())
    else:
        monkeypatch.setattr(LanguageModel, "shares_prefixes", False)
    engine = gathering()
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    try:
        for replies in (serve(engine, MIXED), serve(engine, MIXED)):  # without and with a kept prefix
            for asked, reply in zip(MIXED, replies, strict=True):
                whole = log_pi(policy, asked.prompt.ids + reply.ids, asked.temperature or 1.0)
                start = len(asked.prompt) - 1
                expected = [float(whole[start + k, token]) for k, token in enumerate(reply.ids)]
                assert reply.logps == pytest.approx(expected, abs=1e-10)
    finally:
        engine.stop()


def test_small_batches(policy):
    engine = TransformersEngine(max_batch=2)
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    try:
        with batches_of(policy) as shapes:
            few = serve(engine, MIXED)
        assert max(rows for rows, _ in shapes) == 2
        engine.max_batch = 64
        assert_same(serve(engine, MIXED), few)
    finally:
        engine.stop()


def test_a_short_reply_does_not_wait_for_a_long_one(engine, policy):
    """While one reply of 60 tokens is sampled, another player gets all of its own; both are what they are alone."""
    long, shorts = request(PREFIX, max_tokens=60), [request((*PREFIX, k), seed=k, max_tokens=2) for k in range(3, 13)]
    alone = [serve(engine, [one])[0] for one in (long, *shorts)]
    assert len(alone[0].ids) > 2 * len(shorts)
    events: list[str] = []

    async def play(seat, requests) -> list[Reply]:
        with seat:
            replies = []
            for one in requests:
                replies.append(await engine.generate(one))
                events.append(f"{one.max_tokens} tokens")
            return replies

    async def both() -> list[Reply]:
        with engine.seats(2) as (one, other):
            replies = await asyncio.gather(play(one, [long]), play(other, shorts))
        return [*replies[0], *replies[1]]

    with batches_of(policy) as shapes:
        assert_same(asyncio.run(both()), alone)
    assert events == ["2 tokens"] * len(shorts) + ["60 tokens"]
    assert max(rows for rows, _ in shapes) == 2  # the place of each short reply is taken by the next
    assert len(shapes) < len(alone[0].ids) + len(shorts) + 4  # no step is made for a short reply alone


def test_a_row_that_leaves_takes_its_columns_along(engine, policy):
    """What stays is no wider than the longest row that is left, whoever was there first."""
    wide, narrow = request(random_ids(9, 60), seed=1, max_tokens=2), request(random_ids(3, 4), seed=2, max_tokens=20)
    alone = [serve(engine, [one])[0] for one in (wide, narrow)]
    engine.sync(0)
    widths: list[int] = []

    def note(_module, _args, kwargs):
        if kwargs["input_ids"].shape[1] == 1 and "tree" not in kwargs:
            widths.append(kwargs["attention_mask"].shape[1])

    handle = policy.lm.base_model.register_forward_pre_hook(note, with_kwargs=True)
    assert_same(serve(engine, [wide, narrow]), alone)
    handle.remove()
    assert widths[0] == 61
    assert widths[1:] == list(range(6, 4 + len(alone[1].ids)))


def test_a_reply_that_nobody_waits_for_is_not_sampled_to_its_end(engine, policy):
    async def leave() -> Reply:
        abandoned = asyncio.create_task(engine.generate(request(PREFIX, seed=1, max_tokens=1500)))
        await engine.generate(request(PREFIX, seed=2, max_tokens=3))
        abandoned.cancel()
        return await asyncio.wait_for(engine.generate(request(PREFIX, seed=3, max_tokens=3)), timeout=60)

    engine.stop()
    engine.start(PolicyHandle(policy, (), nullcontext))  # nothing ends a reply early
    with batches_of(policy) as shapes:
        asyncio.run(leave())
        (expected,) = serve(engine, [request(PREFIX, seed=3, max_tokens=3)])  # behind everything else
    assert len(expected.ids) == 3
    assert len(shapes) < 1000


def test_a_kept_prefix_is_not_computed_again(engine, policy):
    with batches_of(policy) as shapes:
        first = serve(engine, [request(PREFIX + random_ids(k, 3), seed=k, max_tokens=1) for k in range(3)])
    assert shapes == [(1, 20), (1, 9)]  # the rest of three prompts as one row
    with batches_of(policy) as shapes:
        second = serve(engine, [request(PREFIX + random_ids(k, 3), seed=k, max_tokens=1) for k in range(3)])
    assert shapes == [(1, 9)]
    assert_same(first, second)


@pytest.mark.parametrize("shared", [LEAST_PREFIX - 1, LEAST_PREFIX])
def test_a_few_tokens_in_common_are_read_with_each_batch(engine, policy, shared):
    with batches_of(policy) as shapes:
        serve(engine, [request(PREFIX[:shared] + random_ids(k, 3), seed=k, max_tokens=1) for k in range(3)])
    assert shapes == ([(1, shared), (1, 9)] if shared >= LEAST_PREFIX else [(1, shared + 9)])


def test_a_kept_prefix_serves_only_those_who_share_it(engine):
    """Prefixes of equal length one after the other, then one that goes on where the kept one ends."""
    groups = [
        [request(start + random_ids(k, 3), seed=k) for k in range(2)]
        for start in (PREFIX, random_ids(9, 20), PREFIX + random_ids(8, 5), PREFIX[:12])
    ]
    alone = []
    for group in groups:
        engine.sync(0)
        alone.append(serve(engine, group))
    for group, expected in zip(groups, alone, strict=True):
        assert_same(serve(engine, group), expected)


def test_images_are_refused_where_their_pixels_would_be_needed(engine):
    asked = SamplingRequest(text(*PREFIX) + image("cat", 3) + text(3), 4, 1.0, 0)
    with pytest.raises(ValueError, match="TransformersEngine reads text only, but got an image of 3 tokens"):
        serve(engine, [asked])


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_first_token_is_drawn_from_the_softmax(engine, policy, temperature):
    """Pearson's statistic over the likely tokens and the rest; 5 standard deviations of chi-square."""
    count = 1500
    replies = serve(engine, [request(PREFIX, seed, max_tokens=1, temperature=temperature) for seed in range(count)])
    seen = Counter(reply.ids[0] for reply in replies)
    pi = log_pi(policy, PREFIX, temperature)[-1].exp()
    likely = [i for i in range(len(pi)) if float(pi[i]) * count >= 8]
    assert len(likely) >= 3
    expected = [float(pi[i]) * count for i in likely]
    observed = [seen[i] for i in likely]
    rest = count - sum(expected)
    if rest > 8:
        expected, observed = [*expected, rest], [*observed, count - sum(observed)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_takes_the_most_likely_token(engine, policy):
    (reply,) = serve(engine, [request(PREFIX, temperature=0.0)])
    ids = list(PREFIX)
    for token, logp in zip(reply.ids, reply.logps, strict=True):
        best = log_pi(policy, ids, 1.0)[-1]
        assert token == int(best.argmax())
        assert logp == pytest.approx(float(best.max()), abs=1e-10)
        ids.append(token)
    assert serve(engine, [request(PREFIX, seed=99, temperature=0.0)])[0].ids == reply.ids


def test_cap_and_close(policy, engine):
    (free,) = serve(engine, [request(PREFIX, max_tokens=8)])
    assert free.ids[:3] != free.ids[3:6]
    assert (len(free.ids), free.closed) == (8, False)
    engine.stop()
    stop_at = free.ids[4]
    assert stop_at not in free.ids[:4]
    engine.start(PolicyHandle(policy, (CLOSE, stop_at), nullcontext))
    for cap in range(1, 8):
        (reply,) = serve(engine, [request(PREFIX, max_tokens=cap)])
        assert reply.ids == free.ids[: min(cap, 5)]  # the closing token belongs to the reply
        assert reply.closed == (cap >= 5)


def test_an_error_reaches_everyone_and_the_engine_goes_on(engine):
    good = request(PREFIX)
    expected = serve(engine, [good])

    async def with_a_bad_one() -> list[Reply | BaseException]:
        bad = request((VOCABULARY + 999,))  # no such row in the embedding
        together = asyncio.gather(*map(engine.generate, [good, bad, good]), return_exceptions=True)
        return await asyncio.wait_for(together, timeout=60)

    outcomes = asyncio.run(with_a_bad_one())
    assert [type(outcome) for outcome in outcomes] == [IndexError] * 3
    assert_same(serve(engine, [good]), expected)


def test_an_error_of_one_that_joins_reaches_it_too(engine, policy):
    engine.start(PolicyHandle(policy, (), nullcontext))  # without stop tokens, so that no reply ends early
    good, endless = request(PREFIX), [request(random_ids(seed, 8), seed, max_tokens=900) for seed in range(8)]
    expected = serve(engine, [good])

    async def with_a_bad_one() -> list[Reply | BaseException]:
        running = [asyncio.create_task(engine.generate(one)) for one in endless]
        await asyncio.sleep(0.1)
        assert not all(task.done() for task in running)
        bad = engine.generate(request((VOCABULARY + 999,)))  # no such row in the embedding
        return await asyncio.wait_for(asyncio.gather(*running, bad, return_exceptions=True), timeout=60)

    outcomes = asyncio.run(with_a_bad_one())
    assert {type(outcome) for outcome in outcomes} == {IndexError}
    assert_same(serve(engine, [good]), expected)


def test_a_caller_that_left_does_not_harm_the_others(engine):
    expected = serve(engine, [request(PREFIX)])

    async def leave() -> None:
        task = asyncio.create_task(engine.generate(request(PREFIX, max_tokens=40)))
        await asyncio.sleep(0.03)
        task.cancel()

    asyncio.run(leave())  # the loop is closed while the engine still works for it
    assert_same(serve(engine, [request(PREFIX)]), expected)
    loop = asyncio.new_event_loop()
    engine._started()[0].ask(request(PREFIX), loop.create_future())
    loop.close()
    assert_same(serve(engine, [request(PREFIX)]), expected)


def test_sync_takes_new_weights(engine, policy):
    asked = [request(PREFIX + random_ids(k, 2), seed=k) for k in range(3)]
    old = serve(engine, asked)
    assert [reply.policy_version for reply in old] == [0, 0, 0]
    with torch.no_grad():
        for parameter in policy.lm.base_model.layers.parameters():
            parameter.mul_(1.3)
    engine.sync(7)
    new = serve(engine, asked)
    assert [reply.policy_version for reply in new] == [7, 7, 7]
    assert [reply.logps for reply in new] != [reply.logps for reply in old]
    for one, reply in zip(asked, new, strict=True):
        whole = log_pi(policy, one.prompt.ids + reply.ids, 1.0)
        expected = [float(whole[len(one.prompt) - 1 + k, token]) for k, token in enumerate(reply.ids)]
        assert reply.logps == pytest.approx(expected, abs=1e-10)


def test_modes_and_checkpointing_are_left_as_they_were(engine, policy):
    expected = serve(engine, MIXED)
    checkpoint_activations(policy.lm)
    assert_same(serve(engine, MIXED), expected)
    assert policy.training
    policy.eval()
    assert_same(serve(engine, MIXED), expected)
    assert not policy.training
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_precision_of_the_trainer_is_used(tiny_folder):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    seen = []
    policy.lm.base_model.layers[0].mlp.register_forward_hook(lambda _m, _x, y: seen.append(y.dtype))
    engine = TransformersEngine()
    engine.start(PolicyHandle(policy, (CLOSE,), lambda: torch.autocast("cpu", torch.bfloat16)))
    try:
        serve(engine, [request(PREFIX, max_tokens=2)])
    finally:
        engine.stop()
    assert set(seen) == {torch.bfloat16}


def test_weights_are_cast_once_for_all_that_is_collected_with_them(tiny_folder):
    """And not kept beyond it: not to be trained on, nor to be sampled from later."""
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    weight = policy.lm.base_model.layers[0].mlp.down_proj.weight
    precision = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=True)
    engine = TransformersEngine()
    engine.start(PolicyHandle(policy, (CLOSE,), precision))

    def sampled():
        (reply,) = serve(engine, [request(PREFIX[:4])])  # too short for what is kept of prompts
        return reply.logps[0]

    def change():
        with torch.no_grad():
            weight.neg_()

    try:
        with engine.collecting():
            first = sampled()
            change()  # as it must not be there; so it is seen that nothing casts the weight
            assert sampled() == first
        with engine.collecting():
            second = sampled()
            assert second != pytest.approx(first, abs=0.1)
        third = sampled()
        change()
        engine.sync(1)
        assert sampled() != pytest.approx(third, abs=0.1)
        with precision():
            policy.hidden(pack([text_row(PREFIX, (1,))])).float().square().sum().backward()
        assert weight.grad is not None
    finally:
        engine.stop()


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_an_engine_that_is_started_anew_takes_the_new_precision(tiny_folder, first):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    seen = []
    policy.lm.base_model.layers[0].mlp.register_forward_hook(lambda _m, _x, y: seen.append(y.dtype))
    precisions = {torch.bfloat16: lambda: torch.autocast("cpu", torch.bfloat16), torch.float32: nullcontext}
    engine = TransformersEngine()
    try:
        for dtype in sorted(precisions, key=lambda dtype: dtype != first):
            engine.start(PolicyHandle(policy, (CLOSE,), precisions[dtype]))
            serve(engine, [request(PREFIX, max_tokens=2)])
            assert set(seen) == {dtype}
            seen.clear()
    finally:
        engine.stop()


def test_sampling_from_a_copy_leaves_the_weights_that_autocast_keeps_for_the_update(tiny_folder):
    """Else gradients of micro-batches would be rounded in groups that depend on when a reply is done."""
    policy, x = LanguageModel(load_causal_lm(str(tiny_folder))), torch.ones(1, 4)
    trained = torch.nn.Linear(4, 4)

    def bias_as_cast():
        return trained(x).grad_fn.next_functions[0][0]

    engine = TransformersEngine()
    handle = PolicyHandle(policy, (CLOSE,), lambda: torch.autocast("cpu", torch.bfloat16), trained_meanwhile=True)
    engine.start(handle)
    engine.sync(0)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            before = bias_as_cast()
            serve(engine, [request(PREFIX, max_tokens=2)])
            assert bias_as_cast() is before
    finally:
        engine.stop()


def test_start_stop_start(policy, tiny_folder):
    engine = TransformersEngine()
    engine.stop()  # harmless
    with pytest.raises(RuntimeError, match="not started"):
        serve(engine, [request(PREFIX)])
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    first = serve(engine, MIXED[:3])
    engine.stop()
    engine.stop()
    with pytest.raises(RuntimeError, match="not started"):
        serve(engine, [request(PREFIX)])
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    assert_same(serve(engine, MIXED[:3]), first)
    other = LanguageModel(load_causal_lm(str(tiny_folder)).double())
    torch.nn.init.normal_(other.lm.base_model.layers[0].mlp.down_proj.weight)
    engine.start(PolicyHandle(other, (CLOSE,), nullcontext))  # another policy while running: its own prefix
    changed = serve(engine, MIXED[:3])
    engine.sync(0)
    assert_same(serve(engine, MIXED[:3]), changed)
    assert [reply.logps for reply in changed] != [reply.logps for reply in first]
    engine.stop()


def test_stop_answers_those_who_still_wait(policy):
    engine = TransformersEngine(max_batch=1)
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))

    desk = engine._started()[0]

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.001)

    async def too_late() -> list[Reply | BaseException]:
        first = asyncio.create_task(engine.generate(request(PREFIX, max_tokens=60)))
        await asyncio.sleep(0)
        await until(lambda: not desk._queue)  # it is being sampled
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
        await until(lambda: desk._closed)
        late = asyncio.create_task(engine.generate(request(PREFIX)))
        outcomes = await asyncio.wait_for(asyncio.gather(first, late, return_exceptions=True), timeout=30)
        await stopping
        return outcomes

    first, late = asyncio.run(too_late())
    assert isinstance(first, Reply)
    assert isinstance(late, RuntimeError)


def test_requests_wait_for_company_only_briefly(policy):
    """Not once for each place in the batch, which would take hours; `serve` gives up long before."""
    engine = TransformersEngine(max_batch=1_000_000)
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext))
    try:
        serve(engine, [request(PREFIX, max_tokens=1)])
    finally:
        engine.stop()


def test_a_batch_has_room_for_someone():
    with pytest.raises(ValueError, match=r"max_batch.*1.*0"):
        TransformersEngine(max_batch=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_is_told_that_sampling_has_ended(engine, monkeypatch):
    """Such as by a warning that counts as an error, in the thread that samples."""

    def fails(room: int, running: bool) -> float:
        if not engine._desk._queue:  # the thread has only now come back to the desk, which is locked until it waits
            return math.inf
        raise UserWarning("an environment asked for nothing")

    serve(engine, MIXED[:1])
    monkeypatch.setattr(engine._desk, "_seconds_to_wait", fails)
    for reason in ("sampling has ended: UserWarning: an environment", "the engine was stopped"):
        with pytest.raises(RuntimeError, match=reason):
            serve(engine, MIXED[:1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StopIteration("no next one"), "StopIteration: no next one"),
        (SystemExit(3), "sampling has ended: SystemExit: 3"),
        (ValueError("wrong"), "wrong"),
    ],
)
def test_whatever_a_model_raises_is_told_to_all_who_wait(engine, policy, error, message):
    def fails(*_: object) -> None:
        raise error

    async def all_told() -> list[Reply | BaseException]:
        asked = [engine.generate(one) for one in MIXED]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=60)

    handle = policy.lm.base_model.register_forward_pre_hook(fails)
    outcomes = asyncio.run(all_told())
    handle.remove()
    assert len(outcomes) == len(MIXED)
    assert all(isinstance(one, Exception) and message in str(one) for one in outcomes)
