"""`mmspec bench` and `mmspec check` on models that draw."""

from tests.tiny_models.llamagen import GRID

CELLS = GRID**2


def test_bench_records_have_the_figures_of_images(run_json, llamagens):
    table = run_json(
        "bench", llamagens["class"], "--accelerator", "sjd:coupling=exact:window=8,zipar:zipar_window=2",
        "--samples", 2, "--repeats", 1, "--guidance-scale", 1.5, "--batch-size", 2,
    )  # fmt: skip
    plain, exact, zipar = records = table["records"]
    settings = table["settings"]
    assert settings["task"] == "generate" and settings["batch_size"] == 2
    assert (settings["guidance_scale"], settings["temperature"], settings["top_k"]) == (1.5, 1.0, 0)
    assert settings["baseline"].startswith("plain decoding")
    for record in records:
        assert record["new_tokens"] == 2 * CELLS
        assert record["state_bytes"] > 0 and record["pixel_seconds"] > 0
    assert (plain["nfe_mean"], plain["nfe_max"], plain["step_compression"]) == (CELLS, CELLS, 1.0)
    assert exact["identical"] == 1.0 and exact["promise"] == "exact" and exact["window"] == 8
    assert exact["nfe_mean"] <= CELLS
    assert zipar["nfe_max"] == GRID + (GRID - 1) * 2
    assert zipar["promise"] == "lossy, no bound" and zipar["window"] == 1 + GRID // 2
    assert plain["tv"] is None and exact["tv"] is None
    assert 0 < zipar["tv"]["mean"] < zipar["tv"]["max"] <= 1
    assert plain["speedup"] == plain["speedup_with_pixels"] == 1.0


def test_check_passes_what_is_exact(run_json, llamagens):
    report = run_json(
        "check", llamagens["caption"], "--accelerator", "sjd:window=8", "--samples", 4, "--batch-size", 4
    )
    assert report["passed"] is True
    greedy, distribution = report["comparisons"]
    assert (greedy["mode"], greedy["equal"]) == ("greedy", 4)
    assert (
        distribution["mode"] == "distribution"
        and distribution["distribution"]["places"] == 4 * CELLS
        and distribution["distribution"]["p_value"] > 1e-6
    )
