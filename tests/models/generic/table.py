"""The lists of transformers' decoders and multimodal models in docs/families.md.

python -m tests.models.generic.table             # writes the page again, after a change of the families
python -m tests.models.generic.table --run       # first runs every model, in six minutes, and writes `RESULTS`
python -m tests.models.generic.table --run NAME  # runs these models alone
"""

import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paged.models.registry import ARCHITECTURES
from paged.tools.printable import one_line
from tests.models.generic.every_decoder import decoders, multimodal_models, result_of
from tests.models.published_settings.others import OTHERS
from tests.models.published_settings.settings import PUBLISHED, published

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
    """Return the lines of the page that say how the classes of `saved_results` run, and with which settings."""
    saved = saved_results(kind)
    kinds: dict[str, list[str]] = {"native": [], "generic": [], "refused": [], "unbuilt": []}
    for name, result in saved.items():
        kinds[result.partition(":")[0]].append(name)
    known = {_plain(published(row)[0]) for row in PUBLISHED} | set(map(_plain, OTHERS))
    unknown = {name for name in saved if _plain(name) not in known}
    as_published = [name for name in kinds["generic"] if name not in unknown]
    by_default = [name for name in kinds["generic"] if name in unknown]
    lines = [f"Of {len(saved)} {classes}, {len(kinds['native'])} run by a family."]
    if as_published:
        lines.append(
            f"These {len(as_published)} run by transformers' module, with the settings of a published model:\n"
        )
        lines += [*_names(as_published), ""]
    lines += [
        f"These {len(by_default)} run by transformers' module with its default settings.",
        "Published settings may differ, and none are known here:\n",
        *_names(by_default),
        f"\n{len(kinds['refused'])} are refused, and {len(kinds['unbuilt'])} could not be built for the tests.",
        "An asterisk marks transformers' default settings, where no published ones are known here:\n",
    ]
    for name in kinds["refused"] + kinds["unbuilt"]:
        mark = "*" if name in unknown else ""
        lines.append(f"- `{name}`{mark}: {saved[name]}")
    lines.append("\nThese run by a family, and no published settings of theirs are known here:\n")
    return lines + _names([name for name in kinds["native"] if name in unknown])


def _plain(name: str) -> str:
    """Return a class's name as transformers and authors both spell it."""
    return name.replace("_", "").casefold()


def _names(names: list[str]) -> list[str]:
    return textwrap.wrap(", ".join(f"`{name}`" for name in names), 120)


def _short(result: str) -> str:
    kind, _, reason = result.partition(": ")
    for beginning in ("cannot run with a paged cache: ", "cannot be built or run: ", "/config.json: "):
        reason = reason.partition(beginning)[2] or reason
    for detail in (", by ", " (RuntimeError", " (NotImplementedError", ". "):
        reason = reason.partition(detail)[0]
    reason = one_line(" ".join(reason.split()), _LONGEST)
    return f"{kind}: {reason}" if reason else kind


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--run"]:
        for kind, names in {"decoders": decoders(), "multimodal": multimodal_models()}.items():
            run = [name for name in names if name in arguments[1:] or len(arguments) == 1]
            saved = {} if run == names else saved_results(kind)
            saved |= results(run)
            RESULTS[kind].write_text("".join(f"{name} {saved[name]}\n" for name in names))
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
