"""PPO balances a pole: RLlib's own algorithms run through the same command, and a file may be Python.

rllib train file tuned_examples/ppo_cartpole.py

Needs two CPU cores and no model. Stops at a mean return of 150, or after 40 iterations; --checkpoint-at-end keeps the
policy.
"""

from ray.rllib.algorithms.ppo import PPOConfig

config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=1)
    .training(lr=1e-3, train_batch_size=1000, minibatch_size=128, num_epochs=8)
)
stop = {"env_runners/episode_return_mean": 150.0, "training_iteration": 40}
