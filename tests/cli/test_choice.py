"""Syntax of accelerators on the command line."""

import pytest

from mmspec.cli.loading import parse_choice, parse_choices
from mmspec.errors import InputError


def test_options_are_typed_and_entries_of_a_table_are_written_with_a_dot():
    choice = parse_choice("draft_model:num-draft-tokens=3:acceptance=greedy:x=0.5:y=true")
    assert choice.name == "draft_model"
    assert choice.options == {"num_draft_tokens": 3, "acceptance": "greedy", "x": 0.5, "y": True}
    assert parse_choice("copy:a.b-c=3:a.d=pooling").options == {"a": {"b_c": 3, "d": "pooling"}}
    assert [choice.label for choice in parse_choices("copy, none,copy")] == ["copy", "none"]


def test_what_cannot_be_read_is_refused():
    for text in ["", " , ", "copy:", "copy:a", "copy:=3", "nothing", "copy:a.=3", "copy:a=3:a.b=4"]:
        with pytest.raises(InputError):
            parse_choices(text)


def test_ways_of_drawing_siblings_are_choices_of_one_run() -> None:
    """SpecTr, MCSD, EAGLE-1 and a chain, as a table compares them."""
    from mmspec.accelerators import build_accelerator
    from tests.contracts.checks import llama
    from tests.methods import eagle_checks

    asked = {
        "draft_model:tree=4x1x1x1:sampling=sampled:acceptance=k_sequential": "KSequential",
        "draft_model:tree=4x2x2:sampling=sampled": "RecursiveRejection",
        "draft_model:tree=4x2x2:sampling=without_replacement": "RecursiveRejection",
        "draft_model:tree=4:sampling=without_replacement": "RecursiveRejection",
        "draft_model:tree=4x2x2:sampling=without_replacement:length=confidence": "RecursiveRejection",
        "draft_model:num_draft_tokens=4:sampling=sampled": "SpeculativeSampling",
        "eagle:tree=eagle:sampling=without_replacement": "RecursiveRejection",
    }
    models = {"draft_model": llama(), "eagle": eagle_checks.head_for(llama())}
    for choice in parse_choices(",".join(asked)):
        made = build_accelerator(choice.name, model=models[choice.name], **choice.options)
        assert type(made.rule).__name__ == asked[choice.label] and made.exactness == "exact"


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("scenes-llamagen", ["none", "sjd", "gsd", "lantern", "zipar", "cjd", "eagle"]),
        ("scenes-diffusion", ["none", "freedave", "low_confidence:places_per_step=2", "threshold"]),
    ],
)
def test_a_bench_compares_the_drafters_of_the_model_by_default(name, labels) -> None:
    from mmspec import MMSpecPipeline
    from mmspec.cli.compared import default_groups
    from mmspec.cli.subject import Subject
    from mmspec.pipelines import ImageGenerationPipeline

    source = f"assets/{name}"
    pipe = MMSpecPipeline.from_pretrained(source, accelerator="none")
    subject = Subject(pipe, isinstance(pipe, ImageGenerationPipeline), [], {}, {})
    groups = default_groups(None, subject, source, None)
    assert all(len(group) == 1 for group in groups)
    found = [choice.label for (choice,) in groups]
    assert found[: len(labels)] == labels
    for (choice,) in groups:
        subject.contender(choice)
    if name == "scenes-llamagen":
        own = default_groups(None, subject, source, "assets/scenes-llamagen-eagle")
        assert [choice.name for (choice,) in own][-1] == "eagle" and len(own) == 6


def test_options_of_a_rule_are_set_by_name() -> None:
    """The rule of `cspd` takes its options by keyword alone."""
    from mmspec import MMSpecPipeline
    from tests.tiny_models.continuous import folder_of

    choice = parse_choice("cspd:temperature=42:variance_factor=released:max_tries=100:num_draft_tokens=3")
    pipe = MMSpecPipeline.from_pretrained(folder_of("mar"), accelerator="none")
    pipe.set_accelerator(choice.name, drafter=folder_of("mar-draft"), **choice.options)
    rule = pipe.accelerator.rule
    assert (rule.temperature, rule.variance_factor, rule.max_tries) == (42, "released", 100)
    assert pipe.accelerator.drafter.num_draft_tokens == 3
    assert pipe.accelerator.exactness == "approximate"
