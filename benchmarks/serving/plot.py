# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A plot of a result: decoding over streams, prefill over the prompt's length."""

from pathlib import Path

from benchmarks.serving.results import Result


def plot(result: Result, file: Path) -> None:
    """Draws a result; the file's suffix says how, such as .svg or .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (decode, prefill) = pyplot.subplots(
        1, 2, figsize=(10, 4), layout="constrained"
    )
    for color, series in zip(
        pyplot.rcParams["axes.prop_cycle"].by_key()["color"], result.series
    ):
        lengths = sorted({point.prompt_tokens for point in series.points})
        for style, length in zip(("-", "--", ":", "-."), _ends(lengths)):
            points = [p for p in series.points if p.prompt_tokens == length]
            decode.plot(
                [point.streams for point in points],
                [point.decode for point in points],
                f"o{style}",
                color=color,
                label=f"{series.name}, prompts of {length}",
            )
        alone = [point for point in series.points if point.prefill is not None]
        prefill.plot(
            [point.prompt_tokens for point in alone],
            [point.prefill for point in alone],
            "o-",
            color=color,
            label=series.name,
        )

    streams = sorted({p.streams for series in result.series for p in series.points})
    decode.set_xscale("log", base=2)
    decode.set_xticks(streams, [str(number) for number in streams])
    decode.set(title="Decoding", xlabel="streams", ylabel="tokens/s, all streams")
    prompts = sorted(
        {p.prompt_tokens for series in result.series for p in series.points}
    )
    prefill.set_xscale("log", base=2)
    prefill.set_xticks(prompts, [str(number) for number in prompts])
    prefill.set(title="Prefill of one", xlabel="prompt tokens", ylabel="tokens/s")
    for axes in (decode, prefill):
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.suptitle(f"{result.model} on {result.machine}", fontsize="medium")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _ends(lengths: list[int]) -> list[int]:
    """The shortest and the longest: more lines would hide one another."""
    return sorted({*lengths[:1], *lengths[-1:]})
