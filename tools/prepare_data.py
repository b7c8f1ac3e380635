"""Prepare a recipe's data: tokenise its sources once, into a folder that training maps into memory.

    python tools/prepare_data.py RECIPE [key=value ...]

RECIPE is a name in recipes/ or a path; key=value override its settings. A second call finds the data there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.data import Dataset, prepare
from training.recipe import load


def main() -> int:
    words = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    words.add_argument("recipe", metavar="RECIPE", help="a name in recipes/, or a path")
    words.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the recipe's")
    given = words.parse_args()
    try:
        recipe = load(given.recipe, given.overrides)
        dataset = Dataset(prepare(recipe.data, show=True))
    except ValueError as error:  # RecipeError and DataError: they say what to do
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left behind", file=sys.stderr)
        return 130
    info = dataset.info
    documents = f"{info['documents']:,} documents, {info['validation_documents']:,} of them for validation"
    tokens = f"{info['tokens']:,} tokens of {dataset.vocab_size:,} ids ({info['text_bytes'] / 1e6:.1f} MB)"
    print(f"Data: {dataset.folder}")
    print(f"  {documents}; {tokens}; unigram entropy {dataset.unigram_entropy():.3f} nats per token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
