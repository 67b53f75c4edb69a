from dlrm_sharded.plans.cost_provenance import CostProvenance


def test_calibrated_costs_say_their_error() -> None:
    provenance = CostProvenance("calibrated", "cpu: x", error=0.077)
    assert provenance.short_text == "calibrated, within about 8 %"
    assert provenance.text == "calibrated, within about 8 % (costs of cpu: x)"


def test_a_prior_says_why_it_is_one_and_what_corrected_it() -> None:
    reasons = ("no AVX-512 here", "random gather 0.4 of there")
    provenance = CostProvenance("prior", "cpu: x", reasons, num_runs=1)
    assert provenance.short_text == "prior, corrected by 1 run"
    assert provenance.text == (
        "prior, corrected by 1 run (costs of cpu: x): no AVX-512 here; random gather 0.4 of there"
    )
    fields = {"kind": "prior", "hardware": "cpu: x", "reasons": list(reasons)}
    unknown = {"error": None, "rank_error": None, "under_load": False}
    assert provenance.to_json() == fields | {"num_runs": 1} | unknown
    beyond = provenance.extrapolated(["ids 1 to 9, fitted on 1 to 2"])
    assert beyond.is_extrapolated
    assert beyond.text.endswith("; extrapolated: ids 1 to 9, fitted on 1 to 2")
    assert not provenance.extrapolated([]).is_extrapolated


def test_costs_that_are_far_off_are_so_by_a_factor() -> None:
    assert (
        CostProvenance("prior", "cpu: x", error=8.23).short_text
        == "prior, within a factor of about 9"
    )
    assert CostProvenance("prior", "cpu: x", error=2.0).short_text == "prior, within about 200 %"
