"""The three ledgers of `expertmesh cost`: what is kept, what is refused, what it comes to."""

import json
import threading
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from expertmesh.deploy.cli import app
from expertmesh.deploy.cost.bill import read_bill
from expertmesh.deploy.cost.ledger import FILES, Ledger, default_folder
from expertmesh.deploy.cost.records import LoadTest, PlatformCharge, Session
from expertmesh.deploy.cost.summary import summarize
from expertmesh.deploy.exit_codes import ExitCode, Refused

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def load_test(**changes: Any) -> LoadTest:
    fields: dict[str, Any] = {
        "at": NOW, "seconds": 1800.0, "gpus": "8", "price_per_gpu_hour": "2.50", "currency": "USD",
        "prompt_tokens": 4_000_000, "generated_tokens": 1_000_000, "requests": 100,
        "completed": 99, "failures": {"stream cut": 1}, "url": "http://a", "model": "m",
        "concurrency": 8, "max_tokens": 64, "memory_bytes": 5 * 10**9, "memory_of": "processes",
    }  # fmt: skip
    return LoadTest.model_validate(fields | changes)


def session(**changes: Any) -> Session:
    fields: dict[str, Any] = {
        "at": NOW, "seconds": 3600.0, "gpus": "1", "price_per_gpu_hour": "1", "currency": "EUR",
        "requests": 10, "completed": 10, "generated_tokens": 100, "session": "a",
    }  # fmt: skip
    return Session.model_validate(fields | changes)


def charge(**changes: Any) -> PlatformCharge:
    fields: dict[str, Any] = {
        "at": NOW, "start": "2026-11-01T00:00:00Z", "end": "2026-11-02T00:00:00Z",
        "resource": "8xH200", "cost": "480.00", "currency": "USD",
    }  # fmt: skip
    return PlatformCharge.model_validate(fields | changes)


class TestMoney:
    def test_costs_per_million_tokens(self) -> None:
        (line,) = summarize([load_test()])
        # Half an hour of eight GPUs at 2.50: ten dollars.
        assert line.cost == 10
        assert line.per_million_prompt == Decimal("2.5") and line.per_million_generated == 10
        assert line.completion_rate == 0.99 and line.peak_memory_bytes == 5 * 10**9
        assert line.tokens_per_second == pytest.approx(1_000_000 / 1800)

    def test_cents_stay_exact(self) -> None:
        charges = [charge(cost="0.1", start=f"2026-11-01T00:{at:02}:00Z") for at in range(30)]
        assert summarize(charges)[0].cost == Decimal("3.0")

    def test_ledgers_and_currencies_are_never_added_up(self) -> None:
        lines = summarize(
            [load_test(), load_test(currency="EUR"), charge(), session(), session(session="b"),
             load_test(price_per_gpu_hour=None, currency=None)]
        )  # fmt: skip
        assert [(one.ledger, one.currency) for one in lines] == [
            ("load tests", ""), ("load tests", "EUR"), ("load tests", "USD"), ("platform", "USD"),
            ("sessions", "EUR"),
        ]  # fmt: skip
        assert lines[0].cost is None and lines[0].per_million_generated is None
        assert lines[-1].cost == 2

    def test_of_one_session_the_last_record_counts(self) -> None:
        earlier = session(memory_bytes=9, memory_of="processes")
        later = session(seconds=7200.0, generated_tokens=300, memory_bytes=7, memory_of="processes")
        (line,) = summarize([earlier, later])
        assert (line.records, line.cost, line.generated_tokens) == (1, 2, 300)
        assert line.peak_memory_bytes == 9

    def test_a_credit_lowers_the_bill(self) -> None:
        (line,) = summarize([charge(), charge(cost="-80", invoice="credit")])
        assert line.cost == 400 and line.tokens_per_second is None

    def test_nothing_divides_by_zero(self) -> None:
        (line,) = summarize([session(requests=0, completed=0, generated_tokens=0)])
        assert line.completion_rate is None and line.per_million_generated is None


class TestRecords:
    @pytest.mark.parametrize(
        "change",
        [{"currency": None}, {"currency": "usd"}, {"price_per_gpu_hour": "-1"},
         {"price_per_gpu_hour": "NaN"}, {"price_per_gpu_hour": "Infinity"}, {"completed": 101},
         {"completed": 98}, {"seconds": 0}, {"seconds": float("nan")}, {"requests": -1},
         {"version": 2}, {"unknown": 1}, {"at": "2026-11-30T12:00:00"}, {"gpus": "many"}],
    )  # fmt: skip
    def test_load_tests_that_cannot_be(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            load_test(**change)

    @pytest.mark.parametrize(
        "change",
        [{"end": "2026-10-01T00:00:00Z"}, {"end": "2026-11-02T00:00:00"}, {"cost": "free"},
         {"cost": "NaN"}, {"currency": ""}, {"prompt_tokens": -1}],
    )  # fmt: skip
    def test_charges_that_cannot_be(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            charge(**change)

    @given(
        st.decimals(min_value=0, max_value=10**9, places=6, allow_nan=False),
        st.floats(min_value=1e-3, max_value=1e9),
        st.integers(0, 1 << 60),
    )
    def test_a_line_says_what_was_recorded(
        self, price: Decimal, seconds: float, tokens: int
    ) -> None:
        record = load_test(price_per_gpu_hour=price, seconds=seconds, generated_tokens=tokens)
        assert LoadTest.model_validate_json(record.model_dump_json()) == record


class TestLedger:
    def test_it_only_grows(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "new" / "folder")
        assert ledger.read(LoadTest).records == []
        ledger.append([load_test()])
        before = (ledger.folder / FILES[LoadTest]).read_bytes()
        ledger.append([load_test(model="other"), load_test()])
        ledger.append([session()])
        ledger.append([])
        assert (ledger.folder / FILES[LoadTest]).read_bytes().startswith(before)
        assert [one.model for one in ledger.read(LoadTest).records] == ["m", "other", "m"]
        assert len(ledger.read(Session).records) == 1 and ledger.read(LoadTest).problems == []

    def test_damaged_lines_are_named_and_the_others_read(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        ledger.append([load_test()])
        path = tmp_path / FILES[LoadTest]
        with path.open("ab") as file:
            file.write(b"{broken\n\n\xff\xfe\n")
            file.write(load_test().model_dump_json().replace('"version":1', '"version":2').encode())
            file.write(b"\n" + session().model_dump_json().encode() + b"\n")
        ledger.append([load_test()])
        page = ledger.read(LoadTest)
        assert len(page.records) == 2
        places = [problem.split(": ")[0] for problem in page.problems]
        assert places == [f"{path}:{number}" for number in (2, 4, 5, 6)]
        assert "another version" in page.problems[2]

    def test_a_line_that_was_cut_off_takes_no_other_with_it(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        ledger.append([load_test()])
        path = tmp_path / FILES[LoadTest]
        path.write_bytes(path.read_bytes()[:-20])  # its writer died
        ledger.append([load_test()])
        page = ledger.read(LoadTest)
        assert len(page.records) == 1 and len(page.problems) == 1 and ":1:" in page.problems[0]

    def test_writers_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        def write() -> None:
            for _ in range(10):
                Ledger(tmp_path).append([load_test(), load_test()])

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        page = Ledger(tmp_path).read(LoadTest)
        assert len(page.records) == 80 and page.problems == []

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(Refused, match="cannot be written"):
            Ledger(tmp_path / "file").append([session()])

    def test_the_default_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        assert default_folder() == tmp_path / "expertmesh" / "cost"


CSV = """start,end,resource,cost,currency,invoice,note
2026-11-01T00:00:00Z,2026-11-02T00:00:00Z,8xH200,480.00,USD,1,a
2026-11-02T00:00:00Z,2026-11-03T00:00:00Z,8xH200,0.10,USD,,"b, c"
"""


class TestBill:
    def write(self, folder: Path, text: str) -> Path:
        (path := folder / "bill").write_text(text)
        return path

    def test_csv_and_json_say_the_same(self, tmp_path: Path) -> None:
        lines = read_bill(self.write(tmp_path, "\ufeff" + CSV), {})
        assert [one.cost for one in lines] == [Decimal("480.00"), Decimal("0.10")]
        rows = '[{"start": "2026-11-01T00:00:00Z", "end": "2026-11-02T00:00:00Z", "cost": 480.10,' \
               ' "resource": "8xH200", "currency": "USD", "extra": 1}]'  # fmt: skip
        (line,) = read_bill(self.write(tmp_path, rows), {})
        assert line.cost == Decimal("480.10")  # as written, never by way of a float

    def test_columns_of_other_names(self, tmp_path: Path) -> None:
        text = CSV.replace("cost", "lineItem/UnblendedCost")
        renamed = {"cost": "lineItem/UnblendedCost"}
        assert read_bill(self.write(tmp_path, text), renamed)[0].cost == 480
        with pytest.raises(Refused, match="price"):
            read_bill(tmp_path / "bill", {"price": "cost"})

    @pytest.mark.parametrize(
        ("text", "needle"),
        [
            (CSV.replace("0.10", "much"), "line 3: column cost"),
            (CSV.replace(",currency", ",money"), "line 2: column currency"),
            (CSV.replace("480.00,USD,1,a", "480.00,USD,1,a,b"), "line 2: more fields"),
            (CSV.replace('"b, c"', '"b'), "unexpected end"),
            (CSV.splitlines()[0], "no line"),
            ("", "no line"),
            ("[]", "no line"),
            ("[1]", "list of objects"),
            ("{}", "list of objects"),
            ("[{}]", "entry 0: column"),
            ("[" * 100_000, "recursion"),
        ],
    )
    def test_bad_bills_are_refused_with_the_place(
        self, tmp_path: Path, text: str, needle: str
    ) -> None:
        with pytest.raises(Refused, match=needle):
            read_bill(self.write(tmp_path, text), {})

    def test_what_is_there_is_not_taken_again(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, CSV)
        arguments = ["cost", "import", str(path), "--ledger", str(tmp_path), "--json"]
        first, second = (CliRunner().invoke(app, arguments) for _ in range(2))
        assert json.loads(first.stdout) == {"imported": 2, "already_there": 0}
        assert json.loads(second.stdout) == {"imported": 0, "already_there": 2}
        told = CliRunner().invoke(app, ["cost", "import", str(path), "--column", "cost"])
        assert told.exit_code == ExitCode.USAGE


class TestReport:
    def report(self, folder: Path, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["cost", "report", "--ledger", str(folder), *arguments])

    def test_a_table_per_ledger_and_no_sum_over_them(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        ledger.append([load_test()])
        ledger.append([charge()])
        ledger.append([session()])
        told = self.report(tmp_path)
        assert told.exit_code == 0
        for needle in ("load tests", "platform", "sessions", "99.00% (99 of 100)", "5.00 GB",
                       "10.0000", "480.0000", "not added up"):  # fmt: skip
            assert needle in told.stdout
        assert "490" not in told.stdout and "491" not in told.stdout
        report = json.loads(self.report(tmp_path, "--json").stdout)
        assert len(report["ledgers"]) == 3 and report["problems"] == []
        assert report["ledgers"][0]["per_million_generated"] == "10.000000"

    def test_damage_has_its_own_exit_code(self, tmp_path: Path) -> None:
        Ledger(tmp_path).append([load_test()])
        with (tmp_path / FILES[LoadTest]).open("a") as file:
            file.write("{}\n")
        told = self.report(tmp_path)
        assert told.exit_code == ExitCode.DAMAGED_LEDGER
        assert f"{FILES[LoadTest]}:2" in told.stderr and "10.0000" in told.stdout
        assert len(json.loads(self.report(tmp_path, "--json").stdout)["problems"]) == 1

    def test_nothing_yet(self, tmp_path: Path) -> None:
        told = self.report(tmp_path)
        assert told.exit_code == 0 and "nothing is recorded" in told.stdout
