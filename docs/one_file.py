"""Turn-level PPO for a language agent in one file.

    python docs/one_file.py MODEL_FOLDER --env agentrl_envs:GuessNumber-v0 --iterations 5

MODEL_FOLDER holds a small causal language model with a chat template. Read from the top: play, score, advantages,
update. Capitals that end a name are axes: T tokens of a row, K tokens of a reply, V words of the vocabulary.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain, islice
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed


@dataclass
class Recipe:
    """Every number of the algorithm."""

    envs: int = 8
    turns: int = 4  # of each environment in an iteration; an episode may go on in the next one
    history: int = 1  # past turns that a prompt shows
    max_reply_tokens: int = 6
    invalid_penalty: float = 0.1  # for a reply that names no action
    kl: float = 0.001  # weight of the KL to the initial policy in the reward
    gamma_step: float = 0.99  # discount and lambda of GAE from turn to turn ...
    lam_step: float = 0.95
    gamma_token: float = 1.0  # ... and from token to token inside a reply
    lam_token: float = 1.0
    mini_batch: int = 16  # turns of one optimizer step
    clip: float = 0.2  # of the ratio of new to old probability, around 1
    dual_clip: float = 3.0  # limit of the ratio for tokens with negative advantage
    entropy_bonus: float = 0.001
    value_clip: float = 0.5  # of the change of a value in one update
    first_token_weight: float = 3.0  # of a reply's first token in the value loss
    lr_actor: float = 1e-5
    lr_critic: float = 1e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


@dataclass
class Turn:
    """A prompt and the one reply that was sampled for it: a training sample. Its scores are filled in later."""

    prompt: list[int]
    reply: list[int]
    sampled_logps: list[float]
    reward: float
    terminated: bool  # the episode ended by the rules of the game
    truncated: bool  # the episode was cut, although the game could go on
    next_prompt: list[int]
    logps_K: Tensor = field(init=False)  # of the actor before the update
    ref_logps_K: Tensor = field(init=False)  # of the initial policy
    values_K: Tensor = field(init=False)  # of the state before each token
    next_value: Tensor = field(init=False)  # of the state after the reply; only if the episode was cut there
    advantages_K: Tensor = field(init=False)
    returns_K: Tensor = field(init=False)


# 1. Play


def play(env: gymnasium.Env, actor: nn.Module, tokenizer: Any, recipe: Recipe) -> Iterator[Turn]:
    """Yield turns without end. An iteration takes a few of them; the next iteration continues the same episode."""
    game: Any = env.unwrapped
    while True:
        observation, _ = env.reset(seed=random.randrange(2**30))
        past, terminated, truncated = [], False, False
        while not (terminated or truncated):
            prompt = render(tokenizer, game, past, observation, recipe)
            reply, logps = sample(actor, prompt, tokenizer.eos_token_id, recipe.max_reply_tokens)
            named = parse(tokenizer.decode(reply, skip_special_tokens=True), game)
            action = game.default_action if named is None else named
            past.append((observation, action))
            observation, reward, terminated, truncated, _ = env.step(action)
            reward = float(reward) - recipe.invalid_penalty * (named is None)
            next_prompt = render(tokenizer, game, past, observation, recipe)
            yield Turn(prompt, reply, logps, reward, terminated, truncated, next_prompt)


def render(tokenizer: Any, game: Any, past: list[tuple[str, str]], observation: str, recipe: Recipe) -> list[int]:
    """Return the ids of a prompt. Each turn has its own, with few past turns, so rows do not grow with episodes."""
    listed = [f"- {name}: {text}" for name, text in game.actions.items()]
    chat = [("system", "\n".join([game.system_prompt, "Actions:", *listed]))]
    for seen, action in past[max(0, len(past) - recipe.history) :]:
        chat += [("user", f"Observation:\n{seen}"), ("assistant", action)]
    chat += [("user", f"Observation:\n{observation}\n\nAnswer with one of: {', '.join(game.actions)}")]
    messages = [{"role": role, "content": content} for role, content in chat]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)  # the template has added special tokens


@torch.no_grad()
def sample(actor: nn.Module, prompt: list[int], end: int, most: int) -> tuple[list[int], list[float]]:
    """Return a reply and its log-probs, drawn token by token from the distribution that is trained."""
    name = "cache" if "cache" in signature(actor.forward).parameters else "past_key_values"  # by transformers version
    reply, logps, past = [], [], {name: DynamicCache(config=actor.config)}  # past: keys and values of all tokens read
    while len(reply) < most and reply[-1:] != [end]:
        log_pi_V = actor(torch.tensor([reply[-1:] or prompt]), use_cache=True, **past).logits[0, -1].log_softmax(-1)
        reply.append(int(torch.multinomial(log_pi_V.exp(), 1)))
        logps.append(float(log_pi_V[reply[-1]]))
    return reply, logps  # including the end token: the policy also chooses when to stop


def parse(text: str, game: Any) -> str | None:
    """Return the action that the first line of a reply names, or None."""
    said = text.split("ACTION:")[-1].strip().partition("\n")[0].strip(" .*").lower()
    return {**game.aliases, **{name.lower(): name for name in game.actions}}.get(said)


# 2. Score


def logps_and_entropy(policy: nn.Module, turn: Turn) -> tuple[Tensor, Tensor]:
    """Return the log-probs of a reply's tokens and the entropy of the choice at each, [K]."""
    ids_1T = torch.tensor([turn.prompt + turn.reply])
    # The logits at a position predict the next token. Only tokens of the reply are kept, since they were sampled.
    log_pi_KV = policy(ids_1T).logits[0, len(turn.prompt) - 1 : -1].log_softmax(-1)
    logps_K = log_pi_KV.gather(1, torch.tensor(turn.reply)[:, None])[:, 0]
    return logps_K, -(log_pi_KV.exp() * log_pi_KV).sum(1)


def values(critic: nn.ModuleList, prompt: list[int], reply: list[int]) -> Tensor:
    """Return values [K + 1]: of the state before the reply, and of the state after each of its tokens."""
    trunk, head = critic
    return head(trunk(torch.tensor([prompt + reply])).last_hidden_state[0, len(prompt) - 1 :])[:, 0]


@torch.no_grad()
def score(turns: list[Turn], actor: nn.Module, reference: nn.Module, critic: nn.ModuleList) -> None:
    """Fill in log-probs and values of one environment's turns before the update."""
    for turn in turns:
        turn.logps_K, _ = logps_and_entropy(actor, turn)  # not the sampled ones: the ratio must begin at 1
        turn.ref_logps_K, _ = logps_and_entropy(reference, turn)
        turn.values_K = values(critic, turn.prompt, turn.reply)[:-1]
        if turn.truncated or turn is turns[-1]:
            turn.next_value = values(critic, turn.next_prompt, [])[0]


# 3. Advantages


def dual_discount_gae(turns: list[Turn], recipe: Recipe) -> None:
    """Fill in advantages and returns of one environment's turns, from the last token back to the first."""
    for turn in reversed(turns):
        if turn.terminated:
            next_value, next_advantage = 0.0, 0.0
        elif turn.truncated or turn is turns[-1]:
            # A time limit or the end of an iteration cuts the episode: the critic's value replaces the future rewards.
            next_value, next_advantage = turn.next_value, 0.0
        rewards_K = -recipe.kl * (turn.logps_K - turn.ref_logps_K)  # KL to the initial policy, per token
        rewards_K[-1] += turn.reward
        gamma, lam = recipe.gamma_step, recipe.lam_step  # from the last token of a reply to the next turn
        turn.advantages_K = torch.empty_like(rewards_K)
        for k in reversed(range(len(turn.reply))):
            delta = rewards_K[k] + gamma * next_value - turn.values_K[k]
            turn.advantages_K[k] = delta + gamma * lam * next_advantage
            next_value, next_advantage = turn.values_K[k], turn.advantages_K[k]
            gamma, lam = recipe.gamma_token, recipe.lam_token  # between earlier tokens of the reply
        turn.returns_K = turn.advantages_K + turn.values_K


def whiten(turns: list[Turn]) -> None:
    """Scale the advantages of all tokens of an iteration to mean 0 and variance 1. Returns do not change."""
    every = torch.cat([turn.advantages_K for turn in turns])
    for turn in turns:
        turn.advantages_K = (turn.advantages_K - every.mean()) / (every.var() + 1e-8).sqrt()


# 4. Update


def losses(turn: Turn, logps_K: Tensor, entropy_K: Tensor, values_K: Tensor, recipe: Recipe) -> Tensor:
    """Return the losses of policy and critic [2], summed over the tokens of a turn."""
    ratio_K = (logps_K - turn.logps_K).clamp(-20, 20).exp()
    clipped_K = ratio_K.clamp(1 - recipe.clip, 1 + recipe.clip)
    # Beyond the clip, a token has no gradient in the direction of its advantage.
    policy_K = torch.maximum(-turn.advantages_K * ratio_K, -turn.advantages_K * clipped_K)
    # The clip does not limit the loss of a token with negative advantage and a large ratio. The dual clip does.
    bound_K = torch.where(turn.advantages_K < 0, -turn.advantages_K * recipe.dual_clip, torch.inf)
    policy_K = torch.minimum(policy_K, bound_K) - recipe.entropy_bonus * entropy_K
    near_K = turn.values_K + (values_K - turn.values_K).clamp(-recipe.value_clip, recipe.value_clip)
    value_K = 0.5 * torch.maximum((values_K - turn.returns_K).square(), (near_K - turn.returns_K).square())
    value_K[0] *= recipe.first_token_weight  # the advantages of the turn before use this value
    return torch.stack([policy_K.sum(), value_K.sum()])


def step(turns: list[Turn], actor: nn.Module, critic: nn.ModuleList, optimizer: Any, recipe: Recipe) -> Tensor:
    """Take one optimizer step on a mini-batch; return the losses of policy and critic [2], means over its tokens."""
    optimizer.zero_grad()
    tokens, total = sum(len(turn.reply) for turn in turns), torch.zeros(2, dtype=torch.float64)
    for turn in turns:  # gradients are summed, so only one row at a time must fit in memory
        values_K = values(critic, turn.prompt, turn.reply)[:-1]
        loss = losses(turn, *logps_and_entropy(actor, turn), values_K, recipe) / tokens
        loss.sum().backward()
        total += loss.detach()
    for group in optimizer.param_groups:  # separately: a large norm of one must not shrink the other's gradient
        nn.utils.clip_grad_norm_(group["params"], recipe.max_grad_norm)
    optimizer.step()
    return total


def load(folder: str, recipe: Recipe, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return actor, reference, critic, and an optimizer with one parameter group each for actor and critic."""
    actor, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for _ in range(2))
    trunk = AutoModel.from_pretrained(folder, dtype=dtype)
    critic = nn.ModuleList([trunk, nn.Linear(trunk.config.hidden_size, 1, dtype=dtype)])
    for parameter in critic[1].parameters():
        nn.init.zeros_(parameter)  # a new critic predicts 0
    rates = ((actor, recipe.lr_actor), (critic, recipe.lr_critic))
    groups = [{"params": [*model.parameters()], "lr": lr} for model, lr in rates]
    return actor, reference, critic, torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)


def main() -> None:
    """Train, and print reward and losses after each iteration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument("--env", default="agentrl_envs:GuessNumber-v0", help="id of a text environment")
    parser.add_argument("--iterations", type=int, default=5)
    args, recipe = parser.parse_args(), Recipe()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    actor, reference, critic, optimizer = load(args.model, recipe)
    games = [play(gymnasium.make(args.env), actor, tokenizer, recipe) for _ in range(recipe.envs)]
    for iteration in range(args.iterations):
        rollout = [list(islice(game, recipe.turns)) for game in games]
        for turns in rollout:
            score(turns, actor, reference, critic)
            dual_discount_gae(turns, recipe)
        turns = list(chain(*rollout))
        whiten(turns)
        random.shuffle(turns)
        for i in range(0, len(turns), recipe.mini_batch):
            policy, value = step(turns[i : i + recipe.mini_batch], actor, critic, optimizer, recipe)
        gap = max((turn.logps_K - torch.tensor(turn.sampled_logps)).abs().max() for turn in turns)
        print(f"iteration {iteration}: reward per turn {sum(turn.reward for turn in turns) / len(turns):.3f}", end=", ")
        print(f"policy loss {policy:.4f}, value loss {value:.4f}, sampler and scorer {gap:.0e} nats apart")


if __name__ == "__main__":
    main()
