"""The doctor's judgement: from facts to findings with a way out."""

from ops.doctor.checks import (
    Level,
    check_credentials,
    check_machine,
    check_nats_server,
    check_packages,
    check_ports,
    check_python,
    check_servers,
    check_torch,
    error,
    exit_code,
    note,
    ok,
    warning,
)
from ops.doctor.facts import CredentialFacts, MachineFacts, PackageFacts, PortFacts, ServerFacts, TorchFacts

GIB = 1024**3


def machine(**changed):
    facts = {
        "num_cores": 4, "memory_bytes": 16 * GIB, "available_bytes": 8 * GIB, "place": "/runs", "writable": True,
        "free_disk_bytes": 100 * GIB, "max_open_files": 4096, "unix_time_s": 1.8e9, "file_time_offset_s": 0.01,
        "clock_synchronized": True,
    }  # fmt: skip
    return MachineFacts(**{**facts, **changed})


def by_check(findings):
    return {finding.check: finding for finding in findings}


def test_a_sound_machine_has_no_findings_to_mend():
    assert {finding.level for finding in check_machine(machine(), least_disk_bytes=GIB)} == {Level.OK}


def test_each_fault_of_a_machine_is_named_with_a_way_out():
    for changed, check, level in (
        ({"available_bytes": GIB}, "memory", Level.WARNING),
        ({"writable": False}, "disk", Level.ERROR),
        ({"free_disk_bytes": GIB // 2}, "disk", Level.ERROR),
        ({"max_open_files": 256}, "open files", Level.WARNING),
        ({"unix_time_s": 86_400.0}, "clock", Level.ERROR),
        ({"file_time_offset_s": -40.0}, "clock", Level.WARNING),
        ({"clock_synchronized": False}, "clock", Level.NOTE),
    ):
        finding = by_check(check_machine(machine(**changed), least_disk_bytes=GIB))[check]
        assert (finding.level, bool(finding.fix)) == (level, True), changed


def test_an_old_python_is_an_error():
    assert check_python((3, 10, 14)).level is Level.ERROR
    assert check_python((3, 13, 0)).level is Level.OK


def test_a_missing_extra_is_an_error_only_where_the_config_needs_it():
    torch = PackageFacts(name="torch", needed=">=2.9", found="", fits=False, extra="train")
    assert exit_code(check_packages([torch])) == 0
    findings = check_packages([torch], wanted_extras=["train"])
    assert by_check(findings)["package torch"].fix == "pip install 'headrace[train]'"


def test_a_package_that_is_too_old_is_an_error_with_both_versions():
    old = PackageFacts(name="anyio", needed=">=4.9", found="3.7.1", fits=False)
    finding = by_check(check_packages([old]))["package anyio"]
    assert (finding.found, finding.fix) == ("3.7.1, expected anyio>=4.9", "pip install 'anyio>=4.9'")


def test_an_old_or_absent_nats_server_is_an_error():
    assert check_nats_server("/bin/nats-server", "2.10.4", "").level is Level.ERROR
    assert check_nats_server("", "", "no nats-server").level is Level.ERROR
    assert check_nats_server("/bin/nats-server", "2.14.0-RC.1", "").level is Level.OK


def test_a_taken_port_is_an_error_unless_the_run_itself_has_it():
    taken = PortFacts(key="gateway.port", host="127.0.0.1", port=8000, error="Address already in use")
    assert check_ports([taken], run_holder="")[0].level is Level.ERROR
    assert check_ports([taken], run_holder="4711")[0].level is Level.NOTE


def test_a_gpu_that_torch_can_not_use_is_named():
    gpus = ["NVIDIA H100"]
    for facts, level in (
        (TorchFacts(version="2.9", cuda="12.8", devices=gpus), Level.OK),
        (TorchFacts(version="2.9", cuda="12.8"), Level.WARNING),
        (TorchFacts(version="2.9"), Level.WARNING),
    ):
        assert by_check(check_torch(facts, needed=True, gpus=gpus))["gpu"].level is level
    assert by_check(check_torch(TorchFacts(version="2.9"), needed=True, gpus=[]))["gpu"].level is Level.NOTE


def test_torch_is_needed_by_what_trains_with_it_alone():
    assert exit_code(check_torch(TorchFacts(), needed=True, gpus=[])) == 1
    assert exit_code(check_torch(TorchFacts(), needed=False, gpus=[])) == 0


def test_a_server_that_does_not_answer_is_an_error():
    found = check_servers([ServerFacts(key="engine.urls", url="http://e:8000", error="refused")])
    assert (found[0].level, found[0].found) == (Level.ERROR, "http://e:8000: refused")


def test_credentials_are_judged_by_their_place():
    absent = CredentialFacts(key="arena.token_env", place="ARENA_TOKEN", present=False)
    shared = CredentialFacts(key="broker.token_file", place="/run/token", present=True, open_to_others=True)
    findings = check_credentials([absent, shared])
    assert [finding.level for finding in findings] == [Level.ERROR, Level.WARNING]
    assert [finding.fix for finding in findings] == ["export ARENA_TOKEN=…", "chmod 600 /run/token"]


def test_only_errors_set_the_exit_code():
    assert exit_code([ok("a", ""), note("b", ""), warning("c", "", "d")]) == 0
    assert exit_code([ok("a", ""), error("b", "", "c")]) == 1


def test_megatron_without_a_gpu_is_told_and_no_error():
    found = check_torch(TorchFacts(version="2.13.0"), needed=True, gpus=[], backend="megatron")
    assert [(one.check, one.level) for one in found] == [("torch", Level.OK), ("gpu", Level.NOTE)]
    assert "Megatron-Core on the CPU" in found[1].found
