"""The base of environments whose agents read and write tokens.

A subclass knows text and writes three methods: what the acting agent reads (:meth:`TokenEnv.prompt`), what its text
does (:meth:`TokenEnv.act`) and whose turn is next (:meth:`TokenEnv.next_agent`). This class owns the tokenizer and the
PettingZoo protocol: observations are the prompt's token ids, actions the response's. Ids that a policy sampled are
never made again from text; text is made of them only to build the next agent's prompt.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from pettingzoo import AECEnv

from rllib_mhgpo.errors import ConfigError, RolloutError
from rllib_mhgpo.forks import copy_layers
from rllib_mhgpo.kinds import whole_number
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.spaces import Tokens, TokenSequence

Messages = str | Sequence[Mapping[str, str]]


class TokenEnv(AECEnv):
    """An AEC environment of token sequences; an episode ends for all agents at once.

    Args:
        agents: names of the agents.
        tokenizer: a name or folder that :func:`rllib_mhgpo.llms.load_tokenizer` takes, or a tokenizer.
        max_prompt_tokens: to how many tokens prompts are fitted; longest observation, unless :meth:`admit` allows more.
        max_response_tokens: longest action.

    Attributes:
        shared: names of attributes that copies of the environment share instead of cloning them.
        max_turns: acts after which an episode is cut off (truncated).
        stop: texts that end a response, besides an EOS.
        response: the ids of the last action.
        longest_prompt: longest observation, in tokens.
        timings: seconds by phase since the environment was made, shared by its copies.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "token_env_v0", "render_modes": ["ansi"], "is_parallelizable": False}
    shared: ClassVar[tuple[str, ...]] = ("tokenizer", "timings", "_space", "metadata", "possible_agents")
    max_turns: int = 100
    stop: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        agents: Sequence[str],
        tokenizer: Any = "tiny",
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 128,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.possible_agents = list(agents)
        self.agents: list[str] = []
        self.max_prompt_tokens = whole_number("max_prompt_tokens", max_prompt_tokens)
        self.max_response_tokens = whole_number("max_response_tokens", max_response_tokens)
        self.admit(self.max_prompt_tokens)
        self.timings: dict[str, float] = {}
        self.render_mode: str | None = None
        self.np_random = np.random.default_rng()
        self.response: Tokens = np.zeros(0, dtype=np.int32)

    def admit(self, tokens: int) -> None:
        """Takes prompts of up to so many tokens, though what can be left out of one is fitted to fewer."""
        self.longest_prompt = tokens
        longest = max(tokens, self.max_response_tokens)  # what is written for a policy may be longer than it says
        self._space = TokenSequence(len(self.tokenizer), longest, sample_length=self.max_response_tokens)

    # --- what a subclass writes ---------------------------------------------------------------------------------

    def start(self, index: int, split: str) -> None:
        """Prepares the episode of root ``index``; stateless environments need none."""

    def prompt(self, agent: str) -> Messages:
        """Returns what ``agent``, whose turn it is, reads: a text or a chat of ``{"role", "content"}`` messages."""
        raise NotImplementedError

    def act(self, agent: str, text: str) -> None:
        """Lets ``text`` of ``agent`` take effect; rewards go through :meth:`reward` and :meth:`reward_all`."""
        raise NotImplementedError

    def next_agent(self) -> str | None:
        """Returns whose turn is next, None when the episode is over."""
        raise NotImplementedError

    def num_roots(self, split: str = "train") -> int:
        """Returns how many root inputs a split has; ``reset(options={"index": i, "split": split})`` takes one.

        Many for training and none for evaluation, unless a subclass says otherwise.
        """
        return 1_000_000 if split == "train" else 0

    def root_id(self, index: int, split: str) -> str:
        """Returns what a root input is called where a reader looks for it: its number, or its id in a file."""
        return str(index)

    @classmethod
    def prefetch(cls, envs: Sequence[Self], texts: Sequence[str]) -> None:
        """Does for many environments in one call what their acts need from outside (retrieval, tools)."""

    def summary(self) -> dict[str, object]:
        """Returns what a reader wants to see of a finished episode, as JSON-like values."""
        return {}

    # --- what a subclass calls ----------------------------------------------------------------------------------

    def reward(self, agent: str, specific: float) -> None:
        """Gives ``agent``, which is acting, what its role alone earns by this act."""
        self.rewards[agent] += specific
        self.infos[agent]["specific_reward"] = self.infos[agent].get("specific_reward", 0.0) + specific

    def reward_all(self, shared: float) -> None:
        """Gives every agent what the team earns by this act."""
        for agent in self.agents:
            self.rewards[agent] += shared
            self.infos[agent].setdefault("specific_reward", 0.0)

    def measure(self, agent: str, **numbers: float) -> None:
        """Records numbers of this act, to be averaged over all acts of the agent."""
        self.infos[agent].setdefault("metrics", {}).update(numbers)

    def score(self, **numbers: float) -> None:
        """Records numbers of the whole episode, at its last act."""
        self._scores.update(numbers)

    def fit(self, render: Callable[[Sequence[Any]], Messages], items: Sequence[Any]) -> tuple[Messages, int]:
        """Renders a prompt with as many of the leading items as :attr:`max_prompt_tokens` allows.

        Returns:
            The prompt and how many items were left out.
        """

        def overflows(kept: int) -> bool:
            return len(self.encode(render(items[:kept]))) > self.max_prompt_tokens

        kept = len(items)
        if overflows(kept):
            kept = max(0, bisect_left(range(len(items)), True, key=overflows) - 1)
        return render(items[:kept]), len(items) - kept

    # --- PettingZoo ---------------------------------------------------------------------------------------------

    def observation_space(self, agent: str) -> TokenSequence:
        """All agents have one common space, so that they can share a policy."""
        return self._space

    def action_space(self, agent: str) -> TokenSequence:
        """All agents have one common space, so that they can share a policy."""
        return self._space

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Starts root ``options["index"]`` of ``options["split"]`` (``train``), or a root drawn by the seed."""
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        options = options or {}
        split = options.get("split", "train")
        count = self.num_roots(split)
        index = options.get("index")
        index = int(self.np_random.integers(count)) if index is None else int(index)
        if not 0 <= index < count:
            raise ConfigError(f"reset: expected an index of 0 to {count - 1} in split {split!r}, found {index}.")
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._scores: dict[str, float] = {}
        self._turns = 0
        self._skip_agent_selection = None
        self.start(index, split)
        self.agent_selection = self.next_agent() or self.agents[0]
        self._observation: Tokens | None = None

    def observe(self, agent: str) -> Tokens:
        """Returns the prompt of the agent whose turn it is, a lone EOS (nothing to read) for the others."""
        if agent != self.agent_selection or self.terminations.get(agent, True) or self.truncations[agent]:
            return np.array([self.tokenizer.eos_token_id], dtype=np.int32)
        if self._observation is None:
            ids = self.read(agent)
            if len(ids) > self.longest_prompt:
                raise RolloutError(
                    f"agent {agent!r}: the prompt has {len(ids)} tokens, the limit is {self.longest_prompt}; "
                    "raise max_prompt_tokens or shorten the template."
                )
            self._observation = ids
        return self._observation

    def step(self, action: Any) -> None:
        """Takes the response of the agent whose turn it is, ids or ``{agent: ids}``; None for an agent at its end."""
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
        else:
            (error,) = self.step_batch([self], [action])
            if error is not None:
                raise error

    @classmethod
    def step_batch(cls, envs: Sequence[Self], actions: Sequence[Any]) -> list[Exception | None]:
        """Steps many live environments at once, so that what they fetch from outside is fetched in one call.

        Returns:
            For each environment why its episode went bad, None where it did not.
        """
        for env, action in zip(envs, actions, strict=True):
            env.response = env._checked(action)
        texts = [env.decode(env.response) for env in envs]
        cls.prefetch(envs, texts)
        return [env._advance(text) for env, text in zip(envs, texts, strict=True)]

    def reseed(self, seed: int) -> None:
        """Gives a fork noise of its own."""
        self.np_random = np.random.default_rng(seed)

    def render(self) -> str:
        """Returns the current prompt as text."""
        return str(self.tokenizer.decode(self.observe(self.agent_selection)))

    def close(self) -> None:
        """Nothing to release."""

    # --- tokens -------------------------------------------------------------------------------------------------

    def read(self, agent: str) -> Tokens:
        """Returns the ids that ``agent`` reads; a subclass whose prompts go on from earlier ids overrides this."""
        return self.encode(self.prompt(agent))

    def encode(self, messages: Messages) -> Tokens:
        """Makes token ids of a text or a chat, by the tokenizer's chat template where it has one."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
            if ids and ids[-1] == self.tokenizer.eos_token_id:
                ids = ids[:-1]
        return np.array(ids, dtype=np.int32)

    def encode_text(self, text: str) -> Tokens:
        """Makes ids of a text that stands in the middle of a context: no template, no special tokens."""
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def decode(self, ids: Tokens) -> str:
        """Makes text of a response; special tokens have no text."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    # --- inside -------------------------------------------------------------------------------------------------

    def _checked(self, action: Any) -> Tokens:
        agent = self.agent_selection
        if isinstance(action, Mapping):
            if set(action) != {agent}:
                raise ValueError(f"step: it is the turn of {agent!r}; found an action for {sorted(action)}.")
            action = action[agent]
        if action is None or not self._space.contains(action):
            raise ValueError(f"step: expected token ids of {agent!r} in {self._space}, found {action!r}.")
        return np.asarray(action, dtype=np.int32)

    def _advance(self, text: str) -> Exception | None:
        agent = self.agent_selection
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.infos = {other: {} for other in self.agents}
        try:
            self.act(agent, text)
            following = self.next_agent()
        except Exception as error:
            return error
        if following is not None and following not in self.possible_agents:
            return ValueError(f"next_agent: expected one of {self.possible_agents} or None, found {following!r}.")
        self._turns += 1
        if following is None:
            self.terminations = dict.fromkeys(self.agents, True)
        elif self._turns >= self.max_turns:
            self.truncations = dict.fromkeys(self.agents, True)
        if following is None or self._turns >= self.max_turns:
            self.infos[agent]["scores"] = self._scores
        self.agent_selection = following or agent
        self._observation = None
        self._accumulate_rewards()
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A fork: own state and own random state, common resources."""
        for name in self.__dict__.keys() & set(self.shared):
            memo[id(self.__dict__[name])] = self.__dict__[name]
        fork = type(self).__new__(type(self))
        memo[id(self)] = fork
        copy_layers(self.__dict__.values(), memo)
        fork.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return fork
