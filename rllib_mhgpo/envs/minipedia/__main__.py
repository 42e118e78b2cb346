"""Writes minipedia as files: ``python -m rllib_mhgpo.envs.minipedia DIR [--level hard] [--facts-seed N]``.

One idea: the files are ordinary HotpotQA records and an ordinary corpus, so that other programs can use them too.
"""

import argparse
import json
from pathlib import Path

from rllib_mhgpo.envs.minipedia import SPLITS, corpus
from rllib_mhgpo.envs.minipedia.records import build_records
from rllib_mhgpo.envs.minipedia.world import LEVELS


def main() -> None:
    """Writes ``{train,dev,test}.json`` and ``corpus.arrow`` into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m rllib_mhgpo.envs.minipedia", description="Writes minipedia as files."
    )
    parser.add_argument("folder", type=Path, help="created if missing")
    parser.add_argument("--facts-seed", type=int, default=0, help="another seed draws other facts (default: 0)")
    parser.add_argument("--level", choices=list(LEVELS), default="standard")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        records = build_records(split, options.facts_seed, LEVELS[options.level])
        (options.folder / f"{split}.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    corpus(options.facts_seed, options.level).save(options.folder / "corpus.arrow")


if __name__ == "__main__":
    main()
