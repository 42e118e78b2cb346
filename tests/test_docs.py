"""What the documentation says of the code is what the code says."""

from pathlib import Path

from rllib_mhgpo.algorithms.config import describe
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig

DOCS = Path(__file__).parent.parent / "docs"


def test_every_key_is_documented_with_its_default() -> None:
    assert describe(MHGPOConfig) in (DOCS / "configuration.md").read_text()
