"""`agentrl serve-policy`: HTTP server of a trained policy, with the protocols that agents use in training."""

from __future__ import annotations

import itertools
import secrets
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.saved_policy import find_policy
from lightning_agentrl.commands.ending import leave_out_noise
from lightning_agentrl.commands.files import naming_argument
from lightning_agentrl.engines import PolicyHandle, SamplingRequest, TransformersEngine
from lightning_agentrl.episodes.agent_env import observation_of
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.errors.secrets import filled
from lightning_agentrl.gateway.conversation import Call, Pending, Place, Refusal, Reply, ToolCall
from lightning_agentrl.gateway.server import Gateway
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.prompts.conversation import conversations_of
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import RefusedMessagesError
from lightning_agentrl.rollout.event_loop import LoopThread

REMEMBERED = 256  # number of stored calls, for retries and for calls that continue a response
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class CallAnswers:
    """Sampler of a policy's replies to calls, without a record of episodes.

    Args:
        model: model of the policy.
        tokenizer: tokenizer of the model.
        max_reply_tokens: largest number of tokens of a reply; a call may set a lower limit.
        temperature: temperature of sampling.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: PreTrainedTokenizerBase, max_reply_tokens: int, temperature: float
    ) -> None:
        self.max_reply_tokens, self.temperature = max_reply_tokens, temperature
        self.room = model.context_length - max_reply_tokens
        if self.room < 1:
            raise ValueError(
                f"replies of {max_reply_tokens} tokens leave no room for a prompt in the model's context of "
                f"{model.context_length} tokens; lower --max_reply_tokens"
            )
        prompt = PromptFormat(max_prompt_tokens=self.room)
        self.renderer = ChatRenderer(tokenizer, prompt, model.image_reader).free_text
        self.engine = TransformersEngine(admission="as_they_come")
        handle = PolicyHandle(model, self.renderer.stop_token_ids, nullcontext, decode=self.renderer.decode)
        self.engine.start(handle)
        self.engine.sync(0)
        self._seed, self._numbers = secrets.randbits(32), itertools.count()

    async def reply(self, call: Call) -> Reply | Refusal:
        """Return the reply to a call, or a refusal with the reason."""
        chat, number = conversations_of(self.renderer), next(self._numbers)
        asked: dict[str, Any] = observation_of(call, Place(None, 0, 0))["call"]
        try:
            chat.check_tools(call.tools)
            images = self.renderer.see(asked["images"]) if asked["images"] else ()
            prompt = chat.whole(asked["messages"], images, call.tools).input
        except (RefusedMessagesError, ValueError) as error:
            return Refusal(str(error))
        if len(prompt) > self.room:
            return Refusal(f"the prompt has {len(prompt)} tokens, and the limit is {self.room}")
        most = min(call.max_tokens or self.max_reply_tokens, self.max_reply_tokens)
        seed = derive_seed(self._seed, number)
        sampled = await self.engine.generate(
            SamplingRequest(prompt, most, self.temperature, seed, (number,), call.stop)
        )
        said = chat.reply(sampled.ids, len(prompt), asked, call.tools, number)
        calls = tuple(ToolCall(**one) for one in said.tool_calls)
        return Reply(said.text, calls, said.finish_reason, said.prompt_tokens, said.tokens)


def serve(policy: CallAnswers, gateway: Gateway) -> None:
    """Answer the calls of a single-line gateway forever."""
    line, loop = gateway.only, LoopThread()
    assert line is not None

    async def answer(pending: Pending) -> None:
        try:
            reply = await policy.reply(pending.call)
        except Exception as error:  # noqa: BLE001 - only this call fails
            reply = Refusal(f"the policy cannot reply: {type(error).__name__}: {error}")
        line.answer(pending, reply)

    while True:
        event = line.events.get()
        if isinstance(event, Pending):  # rewards have no effect outside training
            loop.begin(answer(event))


def serve_policy(
    checkpoint: Path,
    host: str = "127.0.0.1",
    port: int = 8003,
    token: str = "",
    model: str | None = None,
    max_reply_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Start a server of a trained policy, which agents call as in training with OpenAI's or Anthropic's protocol.

    Args:
        checkpoint: checkpoint of `agentrl fit`, or folder written by `agentrl export`.
        host: address to listen on. An address that other machines can reach requires a token.
        port: port to listen on, or 0 for a free port.
        token: secret that clients must send as their API key. Write '${NAME}' to read the token from an environment
            variable.
        model: hub id or folder of the base model, if it moved after the run.
        max_reply_tokens: largest number of tokens of a reply. Default: the run's value, or 512 without a run.
        temperature: temperature of sampling; 0: the most likely token. Default: the run's value, or 1 without a run.

    Raises:
        ValueError: an argument is wrong, or the address cannot be used; the message names the argument to change.
    """
    leave_out_noise()
    token = filled(token, "--token")
    if not token and host not in LOOPBACK:
        raise ValueError(
            f"--host is {host}, where other machines may reach the server; add --token '${{NAME}}' with the "
            "environment variable that holds a secret, or leave --host out"
        )
    for name, value, least in (("max_reply_tokens", max_reply_tokens, 1), ("temperature", temperature, 0)):
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}, but must be at least {least}")
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}; choose another --port or --host") from error
    with naming_argument():
        saved = find_policy(checkpoint, model)
        policy = saved.load()
    if torch.cuda.is_available():
        policy.to("cuda")
    run = saved.settings
    default_tokens, default_temperature = (run.interaction.max_reply_tokens, run.temperature) if run else (512, 1.0)
    most = default_tokens if max_reply_tokens is None else max_reply_tokens
    heat = default_temperature if temperature is None else temperature
    answering = CallAnswers(policy, saved.tokenizer, most, heat)
    gateway = Gateway(listening, REMEMBERED, token)
    address = f"[{host}]" if ":" in host else host
    print(
        f"serving {checkpoint}, replies of up to {most} tokens at temperature {heat:g}\n"
        f"OPENAI_BASE_URL=http://{address}:{gateway.port}/v1 ANTHROPIC_BASE_URL=http://{address}:{gateway.port}",
        flush=True,
    )
    serve(answering, gateway)
