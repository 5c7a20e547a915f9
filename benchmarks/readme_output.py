"""The README's sample output, from one run of `make demo` on MovieLens 100K, shortened and without the films' titles.

    python benchmarks/readme_output.py            # trains, and prints the block
    python benchmarks/readme_output.py --write    # trains, and writes it between the two marks in README.md

GroupLens lets nobody pass its data on, so a film's title is `...`. Every number is the run's own.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- demo: by benchmarks/readme_output.py -->\n```\n"
END = "```\n<!-- /demo -->\n"
EPOCHS, RECOMMENDED, WIDTH = 2, 2, 110


def shown(output: str) -> str:
    r"""What the README shows of a run's output; of what it shows already, the same.

    Example:
        >>> text = "user 1 liked before: A; B\n10 recommendations (the held-out item was: C):\n  1. D  (2.24)\n"
        >>> print(shown(text), end="")
        user 1 liked before: (five titles)
        10 recommendations (the held-out item was: ...):
          1. ...  (2.24)
    """
    lines = [
        line
        if len(line) <= WIDTH or not line.startswith("licence: ")
        else line[: WIDTH - 4] + " ..."
        for line in output.splitlines()
    ]
    epochs = [at for at, line in enumerate(lines) if line.startswith("epoch ")]
    if len(epochs) > EPOCHS + 1:
        first, last = epochs[0], epochs[-1]
        lines[first : last + 1] = [
            *(lines[at] for at in epochs[:EPOCHS]),
            "...",
            lines[last],
        ]
    ranked = [at for at, line in enumerate(lines) if re.match(r" *\d+\. ", line)]
    if len(ranked) > RECOMMENDED:
        lines[ranked[RECOMMENDED] : ranked[-1] + 1] = ["  ..."]
    text = "\n".join(lines).strip("\n") + "\n"
    text = re.sub(
        r"^(user \d+ liked before: ).*$", r"\1(five titles)", text, flags=re.MULTILINE
    )
    text = re.sub(
        r"(the held-out item was: ).*(\):)$", r"\1...\2", text, flags=re.MULTILINE
    )
    return re.sub(
        r"^( *\d+\. ).*(  \(-?\d+\.\d\d\)).*$", r"\1...\2", text, flags=re.MULTILINE
    )


def block(readme: str) -> str:
    """The text between the marks.

    Raises:
        ValueError: a mark is missing.
    """
    _, begin, rest = readme.partition(BEGIN)
    found, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"README.md: the marks {BEGIN.splitlines()[0]} and {END.splitlines()[-1]} must stand around the sample "
            "output"
        )
    return found


def main() -> int:
    """Runs the demo, and writes or prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the block into README.md"
    )
    options = parser.parse_args()
    old = block(README.read_text())
    done = subprocess.run(
        ["make", "--no-print-directory", "demo"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode or "data: ml-100k" not in done.stdout:
        print(
            f"make demo ended with {done.returncode}, and must have trained on ml-100k: set TORCHREC_EXT_DATA",
            file=sys.stderr,
        )
        return 1
    # behind what the set-up says
    new = shown(done.stdout[done.stdout.index("data: ml-100k") :])
    if options.write:
        README.write_text(
            README.read_text().replace(BEGIN + old + END, BEGIN + new + END)
        )
    else:
        print(new, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
