"""One iteration of training language models: deal roots, roll out, give credit, update, hand the weights over.

A subclass says how rewards become advantages; nothing else differs.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import PlacementGroupFactory
from ray.util.debug import log_once
from torch.profiler import record_function

from rllib_mhgpo.alerts import new_alerts, numbers_by_path
from rllib_mhgpo.algorithms import results
from rllib_mhgpo.algorithms.checkpointed import CheckpointedAlgorithm
from rllib_mhgpo.algorithms.guards import check_agents, check_place, check_roots, guard, warn_of_silent_callbacks
from rllib_mhgpo.algorithms.handover import HandOver
from rllib_mhgpo.algorithms.learner_pool import LearnerPool, one_update, refuse_shared_gpus
from rllib_mhgpo.algorithms.policies import followers
from rllib_mhgpo.algorithms.profiling import TABLE, phase_table, traced
from rllib_mhgpo.algorithms.recording import Recorder
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.algorithms.rewards import charge_overlong, kl_penalty, propagated
from rllib_mhgpo.algorithms.runner_pool import RunnerPool
from rllib_mhgpo.credit import token_weights
from rllib_mhgpo.errors import MHGPOError
from rllib_mhgpo.runner import IN_STEP
from rllib_mhgpo.sampling import ONE_TRAJECTORY, STRATEGIES, Options, Strategy, deal_roots
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import FlatTrees, RolloutTree, flatten
from rllib_mhgpo.waves import Play

log = logging.getLogger(__name__)
Credit = dict[str, NDArray[Any]]


class LLMAlgorithm(CheckpointedAlgorithm):
    """The common part of all algorithms of this package."""

    _tokens_generated: int
    _staleness: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps RLlib from explaining how to leave its new API stack: these algorithms know no other."""
        super().__init_subclass__(**kwargs)
        log_once(f"{cls.__name__}_on_new_api_stack")

    # --- what a subclass gives -----------------------------------------------------------------------------------

    def assign_credit(self, flat: FlatTrees) -> Credit:
        """Returns arrays over the N generations: :meth:`rewards`, ``advantage``, ``counted`` and what is logged."""
        raise NotImplementedError

    def more_columns(self, flat: FlatTrees, credit: Credit, update: dict[str, Any]) -> dict[str, Any]:
        """Returns columns that only this algorithm has, nested like the common ones."""
        return {}

    def sample_trees(self) -> list[RolloutTree]:
        """Samples this iteration's trees, one a root."""
        trees = self.roll_out(self._roots(self.iteration))
        if not any(tree.generations for tree in trees):
            raise MHGPOError(
                f"iteration {self.iteration + 1}: every rollout was voided; the first: "
                f"{next(reason for tree in trees for reason in tree.void)}"
            )
        return trees

    def check_agents(self) -> None:
        """Refuses keys that do not fit the environment's agents."""
        check_agents(self.config, self.agents)

    def strategy(self, iteration: int) -> Strategy:
        """Where an iteration's rollouts fork."""
        config = self.config
        options = Options(
            group_size=config.group_size,
            num_agents=len(self.agents),
            fork_probs=tuple(config.fork_probs),
            fork_counts=None if config.fork_counts is None else tuple(config.fork_counts),
            seed=(self.run_seed, iteration),
        )
        build: Callable[[Options], Strategy] = import_named("rollout_strategy", config.rollout_strategy, STRATEGIES)
        return build(options)

    def rewards(self, flat: FlatTrees, rng: np.random.Generator) -> Credit:
        """Returns what each generation stands for: ``reward_shared``, ``reward_specific`` and their sum ``reward``."""
        specific = flat.specific - kl_penalty(flat, self.config, self.learners)
        shared = propagated(flat, specific, self.config, rng)
        return {"reward": shared + specific, "reward_shared": shared, "reward_specific": specific}

    def counted(self, flat: FlatTrees) -> NDArray[np.bool_]:
        """Returns which generations carry loss, as far as no advantage is needed to say so, (N,)."""
        config, counted = self.config, flat.trained.copy()
        if config.train_agents is not None:
            counted &= np.isin(flat.agent, [self.agents.index(agent) for agent in config.train_agents])
        counted &= ~np.isin(flat.agent, [self.agents.index(agent) for agent in config.opponents])
        if config.overlong_filter:
            counted &= ~np.array([generation.truncated for generation in flat.generations])
        return counted

    def make_batch(self, flat: FlatTrees, credit: Credit) -> TrainBatch:
        """Gives every token its weight in its optimiser step; nothing later needs to see a whole group."""
        config = self.config
        lengths = np.where(credit["counted"], [generation.num_tokens for generation in flat.generations], 0)
        steps = flat.tree // (config.minibatch_questions or config.questions_per_iteration)
        previous = None
        if config.sequential_updates:
            rng, agents = np.random.default_rng((self.run_seed, self.iteration, 1)), len(self.agents)
            order = np.array([rng.permutation(agents) for _ in range(steps.max(initial=0) + 1)])
            steps, previous = steps * agents + order[steps, flat.agent], flat.previous
        weights = np.zeros(len(lengths))
        for step in np.unique(steps):
            rows = steps == step
            weights[rows] = token_weights(
                flat.agent[rows], lengths[rows], config.loss_aggregation, config.longest_response
            )
        return TrainBatch.of(flat.generations, credit["advantage"], weights, steps, previous=previous)

    def roll_out(self, roots: Sequence[int]) -> list[RolloutTree]:
        """Plays training roots by this iteration's strategy on all runners; returns their trees, in order."""
        if self._ahead:
            parts, self._ahead = self.pool.finish(self._ahead), {}
        else:
            parts = self.pool.roll_out(roots, self.recorder.recorded(self._training_play(self.iteration), roots))
        for phase in ("generate", "step", *IN_STEP):
            longest = max(part.seconds.get(phase, 0.0) for part in parts)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + longest
        if self.config.num_env_runners:
            oldest = min(part.weights_seq_no for part in parts)
            self._staleness = max(self._staleness, self._updates - oldest)
        self.metrics.aggregate([part.logged for part in parts], key=ENV_RUNNER_RESULTS)
        trees = {tree.root: tree for part in parts for tree in part.trees}
        charge_overlong(trees.values(), self.config)
        self._tokens_generated += sum(g.num_tokens for tree in trees.values() for g in tree.generations)
        return [trees[root] for root in roots]

    # --- RLlib's life of an algorithm ----------------------------------------------------------------------------

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """As RLlib's, but what the main process runs is counted where it runs.

        A learner there takes no CPU of its own, so that fractions are possible; an engine there takes its GPUs, beside
        the learner's where both are parts of one, else the same.
        """
        request = super().default_resource_request(config)
        asked = cls.get_default_config().update_from_dict(config)
        main, *others = request.bundles
        if not asked.num_learners:
            main = {**main, "CPU": asked.num_cpus_for_main_process}
        if asked.engine == "vllm" and not asked.num_env_runners:
            mine, its = main.get("GPU", 0), asked.num_gpus_per_env_runner
            main = {**main, "GPU": mine + its if mine + its <= 1 else max(mine, its)}
        return PlacementGroupFactory([main, *others], strategy=request.strategy)

    def setup(self, config: Any) -> None:
        """Builds runners and learner; in one process they share one module."""
        check_place(config, self._storage)
        super().setup(config)
        self.run_seed = secrets.randbits(31) if self.config.seed is None else int(self.config.seed)
        if self.config.shares_module:
            module = self.learner_group._learner.module
            self.env_runner.share_modules({name: module[name] for name in self.config.policy_names})
        self.learners = LearnerPool(self.learner_group, self.config.num_learners)
        self.pool = RunnerPool(
            self.env_runner_group, self.config.sample_timeout_s, self.config.sample_ahead, self._has_past
        )
        facts = self.pool.first(lambda r: (list(r.env.possible_agents), r.num_roots("train"), r.num_roots("dev")))
        self.agents, self.num_roots, self.num_dev_roots = facts
        self._facts: dict[str, str] = self.pool.first(lambda r: dict(getattr(r.env.unwrapped, "fingerprints", {})))
        if self.config.num_learners > 1 and self.config.num_gpus_per_learner:
            refuse_shared_gpus(self.learners.each(lambda learner: learner.place()))
        check_roots(self.config, self.num_roots)
        warn_of_silent_callbacks(self.config)
        self.check_agents()
        self.pool.first(lambda runner: bool(runner.opponents))  # what cannot play is refused now
        self.recorder = Recorder(self.config, self._storage, self.logdir)
        self._ahead = {}
        self.hand_over = HandOver(self.config, self.learners, self.pool, self.agents)
        self._staleness = 0
        self._dev: dict[str, float] = {}
        self._dev_start: dict[str, float] = {}
        self._history: list[dict[str, float]] = []
        self._updates = 0
        self._seconds: dict[str, float] = {}
        self._tokens_generated = 0
        self._iteration_results: dict[str, Any] = {}

    def training_step(self) -> None:
        """Deals roots, samples trees, gives credit, updates, syncs; see docs/algorithm.md."""
        if not self._dev_start and self.num_dev_roots and self.config.evaluation_interval:
            self._dev_start = self.evaluate()
        # the second iteration: what happens only once is over
        profile = Path(self.logdir) / "profile" if self.config.profile and self.iteration == 1 else None
        with traced(profile):
            self._iteration_results = self._iterate()
        if profile is not None:
            (profile / TABLE).write_text(phase_table(self._iteration_results) + "\n")

    def _iterate(self) -> dict[str, Any]:
        """Makes one iteration; returns its columns, without dev scores."""
        self._seconds, self._tokens_generated, self._staleness = {}, 0, 0
        started = time.perf_counter()
        with self._clock("sample"):
            trees = self.sample_trees()
        with self._clock("credit"):
            flat = flatten(trees, self.agents)
            credit = self.assign_credit(flat)
            batch = self.make_batch(flat, credit)
        if self.config.sample_ahead:
            following = self.iteration + 1
            roots = self._roots(following)
            self._ahead = self.pool.start(roots, self.recorder.recorded(self._training_play(following), roots))
        if self.config.engine_config.get("enable_sleep_mode"):
            self.pool.sleep()
        with self._clock("update"):
            update = self._update(batch, flat)
        self._updates = self.iteration + 1
        with self._clock("sync"):
            self._sync()
        with self._clock("record"):
            self.recorder.write("train", self._updates, trees, flat, credit)
        seconds = {**self._seconds, "total": time.perf_counter() - started}
        columns = results.summarise(
            trees,
            results.Iteration(flat, credit, batch, **update.pop("rows"), followers=self._followers()),
            update,
            self.agents,
            seconds,
            self._tokens_generated,
        )
        culprits = [(trees[flat.tree[row]].root, flat.generations[row].agent) for row in update["not_finite"]]
        guard(self.config, f"iteration {self.iteration + 1}", columns, update, culprits)
        scale = {
            "staleness": self._staleness,
            "num_replaced_runners": self.pool.num_replaced,
            "sync_mb": self.hand_over.size / 1e6,
            "sync_logprob_diff": self.hand_over.difference,
        }
        return results.merged({**columns, **scale}, self.more_columns(flat, credit, update))

    def step(self) -> dict[str, Any]:
        """One iteration's results: RLlib's own, and the columns of docs/metrics.md."""
        result = super().step()
        result.pop("evaluation", None)
        self._iteration_results["time"]["evaluate_s"] = self._seconds.get("evaluate", 0.0)
        columns = {
            **self._iteration_results,
            "dev": self._dev or results.NO_DEV,
            "dev_start": self._dev_start or results.NO_DEV,
        }
        self._history.append({**numbers_by_path(columns), "training_iteration": self._updates})
        for alert in new_alerts(self._history):
            log.warning("iteration %d: %s. Try: %s.", self._updates, alert.message, alert.advice)
        return {**result, **columns}

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, float]:
        """Answers the dev roots greedily on the training runners; returns mean scores and the iteration they are of."""
        if not self.num_dev_roots:
            return {}
        self._call("on_evaluate_start")
        with self._clock("evaluate"):
            count = min(self.num_dev_roots, self.config.evaluation_questions or self.num_dev_roots)
            roots = range(count)
            how = self.recorder.recorded(self._play(ONE_TRAJECTORY, 0.0, "dev", self.iteration), roots)
            trees = [tree for rollouts in self.pool.roll_out(roots, how) for tree in rollouts.trees]
            self._record_dev(trees)
        self._dev = {**results.mean_scores(trees, divisor=count), "iteration": self._updates, "questions": count}
        self._call("on_evaluate_end", evaluation_metrics=self._dev)
        return self._dev

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: Any) -> bool:  # noqa: ARG003  # RLlib's signature
        """Evaluation runs on the training runners: a second group would hold a second engine."""
        return False

    # --- learners ------------------------------------------------------------------------------------------------

    def _update(self, batch: TrainBatch, flat: FlatTrees) -> dict[str, Any]:
        """Updates on all learners; returns what one learner with the whole batch would."""
        timesteps = self._timesteps(len(flat.generations))
        parts = self.learners.each_shard(
            lambda learner, shard: learner.update(training_data=TrainingData(batch=shard), timesteps=timesteps),
            batch, flat.tree,
        )  # fmt: skip
        return one_update(parts, len(batch))

    def _sync(self) -> None:
        """Hands the learners' weights to the runners, which check them."""
        if not self.config.shares_module:
            self.hand_over.give(self._updates)

    # --- inside --------------------------------------------------------------------------------------------------

    def _call(self, name: str, **given: Any) -> None:
        """Calls RLlib's callbacks of this name, which it would call itself where it evaluated."""
        given |= {"algorithm": self, "metrics_logger": self.metrics}
        make_callback(name, self.callbacks, getattr(self.config, f"callbacks_{name}"), kwargs=given)

    def _record_dev(self, trees: Sequence[RolloutTree]) -> None:
        flat = flatten(trees, self.agents)
        shared = propagated(flat, flat.specific, self.config, np.random.default_rng(self.run_seed))
        earned = {"reward": shared + flat.specific, "reward_shared": shared, "reward_specific": flat.specific}
        self.recorder.write("dev", self._updates, trees, flat, earned)

    def _followers(self) -> dict[str, list[int]]:
        """The numbers of the agents that follow each policy, where they do not share one."""
        followed = followers(self.config, self.agents)
        return {name: [self.agents.index(a) for a in followed if followed[a] == name] for name in self.config.policies}

    def _roots(self, iteration: int) -> list[int]:
        return deal_roots(self.run_seed, iteration, self.config.questions_per_iteration, self.num_roots)

    def _training_play(self, iteration: int) -> Play:
        return self._play(self.strategy(iteration), self.config.temperature, "train", iteration)

    def _play(self, strategy: Strategy, temperature: float, split: str, iteration: int) -> Play:
        return Play(
            strategy=strategy,
            temperature=temperature,
            max_tokens=self.config.max_response_tokens,
            seed=(self.run_seed, iteration),
            split=split,
            common_noise=self.config.common_noise,
            void_errors=self.config.env_errors == "void",
            max_turns=self.config.max_turns,
        )

    def _timesteps(self, generations: int) -> dict[str, Any]:
        key = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
        self.metrics.log_value(key, generations, reduce="lifetime_sum")
        return {NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek(key, default=0)}

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with record_function(phase):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started
