"""The lists of transformers' decoders and multimodal models in docs/families.md.

python -m tests.models.generic.table          # writes the page again, after a change of the families
python -m tests.models.generic.table --run    # first runs every model, in six minutes, and writes `RESULTS`
"""

import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paged.models.registry import ARCHITECTURES
from paged.printable import one_line
from tests.models.generic.every_decoder import decoders, multimodal_models, result_of

# Files of results by kind of models.
RESULTS = {kind: Path(__file__).with_name(f"{kind}.txt") for kind in ("decoders", "multimodal")}
PAGE = Path(__file__).parents[3] / "docs" / "families.md"
_TITLE = "## Every decoder of transformers\n"
_MULTIMODAL_TITLE = "## Every multimodal model of transformers\n"
# Characters of a reason.
_LONGEST = 110


def results(names: list[str]) -> dict[str, str]:
    """Return "native", "generic", "refused: reason" or "unbuilt: reason" of classes, from a run of all."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, map(_short, pool.map(result_of, names)), strict=True))


def saved_results(kind: str) -> dict[str, str]:
    """Return the saved `results` of "decoders" or "multimodal"; families that are newer count."""
    saved: dict[str, str] = {}
    for line in RESULTS[kind].read_text().splitlines():
        name, result = line.split(" ", 1)
        saved[name] = "native" if name in ARCHITECTURES else result
    return saved


def page() -> str:
    """Return the page of families with the lists of `saved_results`."""
    before = PAGE.read_text().partition(_TITLE)[0].rstrip()
    lines = [
        f"{before}\n\n{_TITLE}",
        *_list_of("decoders", "classes that `AutoModelForCausalLM` of transformers 5.23 knows"),
        "\nTests compare logits with transformers', on tiny random checkpoints. Other classes, such as those of",
        "trusted code, run if they pass the check at load.",
        f"\n{_MULTIMODAL_TITLE}",
        *_list_of("multimodal", "other classes that transformers has for images and text, or for several inputs"),
    ]
    return "\n".join(lines) + "\n"


def _list_of(kind: str, classes: str) -> list[str]:
    """Return the lines of the page that say how the classes of `saved_results` run."""
    saved = saved_results(kind)
    kinds: dict[str, list[str]] = {"native": [], "generic": [], "refused": [], "unbuilt": []}
    for name, result in saved.items():
        kinds[result.partition(":")[0]].append(name)
    native, generic, refused, unbuilt = (len(names) for names in kinds.values())
    lines = [
        f"Of {len(saved)} {classes}, {native} run by a family.",
        f"These {generic} run by transformers' module:\n",
        *textwrap.wrap(", ".join(f"`{name}`" for name in kinds["generic"]), 120),
        f"\n{refused} are refused, and {unbuilt} could not be built for the tests:\n",
    ]
    lines += [f"- `{name}`: {saved[name]}" for name in kinds["refused"] + kinds["unbuilt"]]
    return lines


def _short(result: str) -> str:
    kind, _, reason = result.partition(": ")
    for beginning in ("cannot run with a paged cache: ", "cannot be built or run: ", "/config.json: "):
        reason = reason.partition(beginning)[2] or reason
    for detail in (", by ", " (RuntimeError", " (NotImplementedError", ". "):
        reason = reason.partition(detail)[0]
    reason = one_line(" ".join(reason.split()), _LONGEST)
    return f"{kind}: {reason}" if reason else kind


def main(arguments: list[str]) -> None:
    if arguments == ["--run"]:
        for kind, names in {"decoders": decoders(), "multimodal": multimodal_models()}.items():
            RESULTS[kind].write_text("".join(f"{name} {result}\n" for name, result in results(names).items()))
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
