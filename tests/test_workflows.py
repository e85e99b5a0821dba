"""What GitHub runs: the workflow files, and `.ci/pull_request` with a scripted memplan in a repository of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.spec import Ladder

TOP = Path(__file__).parents[1]
WORKFLOWS = sorted((TOP / ".github" / "workflows").glob("*.yml"))
LADDERS = ("ci_cpu", "ci_simulated")
"""What the script climbs."""

SCRIPTED = '''
"""A memplan that does as it is told and writes down what it was asked."""
import json, os, pathlib, sys

VERSION, KNOWS = {version!r}, {knows!r}
verb, *given = sys.argv[1:]
text = pathlib.Path(given[0]).read_text() if verb == "ladder" else ""
rungs = [line for line in text.splitlines() if line.startswith("rungs")]
with open(os.environ["ASKED"], "a") as file:
    print(json.dumps([VERSION, verb, *given, *rungs]), file=file)
if verb == "ladder":
    for key in ("parity", "repeat"):
        if key not in KNOWS and key + " =" in text:
            sys.exit(print(f"ladder.toml: unknown key {{key!r}}. Known: rungs.") or 2)
        if key not in KNOWS and "--" + key in given:
            sys.exit(print(f"No such option: --{{key}}") or 2)
    folder = pathlib.Path(given[given.index("--out") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "ladder.jsonl", "a") as file:
        print(VERSION, file=file)
elif verb == "compare":
    print("the comparison of", pathlib.Path(given[0]).read_text().split(), pathlib.Path(given[1]).read_text().split())
    sys.exit(3 if not pathlib.Path(given[0]).read_text() else int(os.environ.get("VERDICT", 0)))
elif verb == "report":
    (pathlib.Path(given[given.index("--out") + 1])).mkdir()
'''


class Repository:
    """A repository whose head and base differ in their memplan, and the script in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.temp = folder / "temp"
        self.asked = folder / "asked"
        self.summary = folder / "summary.md"
        for path in (self.folder / ".ci", self.folder / "ladders", self.temp):
            path.mkdir(parents=True)
        shutil.copy(TOP / ".ci" / "pull_request", self.folder / ".ci")
        for name in LADDERS:
            shutil.copy(TOP / "ladders" / f"{name}.toml", self.folder / "ladders")
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "Nobody")
        self.git("config", "user.email", "nobody@localhost")

    def git(self, *arguments: str) -> str:
        """What git says."""
        done = subprocess.run(["git", *arguments], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, version: str, *, knows: tuple[str, ...] = ("parity", "repeat"), memplan: bool = True) -> None:
        """A commit with another memplan, or with none."""
        package = self.folder / "memplan"
        shutil.rmtree(package, ignore_errors=True)
        if memplan:
            package.mkdir()
            (package / "__init__.py").write_text("")
            (package / "__main__.py").write_text(SCRIPTED.format(version=version, knows=knows))
        (self.folder / "version").write_text(version)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", version)

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """The script's end; nothing that it made for itself may be left."""
        ours = {"PYTHON": sys.executable, "TMPDIR": str(self.temp), "ASKED": str(self.asked), "REPEAT": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "RUNGS"))}
        done = subprocess.run(
            [".ci/pull_request", *arguments],
            cwd=self.folder,
            env=kept | ours | settings,
            capture_output=True,
            text=True,
        )
        assert list(self.temp.iterdir()) == []
        assert len(self.git("worktree", "list").splitlines()) == 1
        return done

    def questions(self) -> list[list[str]]:
        """What the scripted memplans were asked, in order."""
        return [json.loads(line) for line in self.asked.read_text().splitlines()]

    def climbs(self) -> list[str]:
        """The climbs among these: whose memplan, which ladder, which repeat."""
        found = []
        for version, verb, *given in self.questions():
            if verb == "ladder":
                turn = given[given.index("--repeat") + 1] if "--repeat" in given else "1"
                found.append(f"{version} {Path(given[0]).stem} {turn}")
        return found


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A branch `change` that left `main` at `fork`; main has moved on since."""
    made = Repository(tmp_path)
    made.commit("fork")
    made.git("checkout", "-q", "-b", "change")
    made.commit("head")
    made.git("checkout", "-q", "main")
    made.commit("moved")
    made.git("checkout", "-q", "change")
    return made


def test_both_sides_are_climbed_by_turns_and_the_base_is_where_the_change_began(repository: Repository) -> None:
    done = repository.run("main", REPEAT="3")
    assert done.returncode == 0, done.stderr
    assert repository.climbs() == [
        "head ci_cpu 1",
        "fork ci_cpu 1",
        "fork ci_cpu 2",
        "head ci_cpu 2",
        "head ci_cpu 3",
        "fork ci_cpu 3",
        "head ci_simulated 1",
        "fork ci_simulated 1",
    ]
    assert {version for version, verb, *_ in repository.questions() if verb != "ladder"} == {"head"}
    out = repository.folder / "build" / "pull_request"
    assert (out / "base.jsonl").read_text().split() == ["fork"] * 4
    assert (out / "head.jsonl").read_text().split() == ["head"] * 4
    assert {path.name for path in out.iterdir()} >= {"summary.md", "comment.md", "junit.xml", "report"}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("0", "Nothing is worse."),
        ("1", "Something is worse, or is not covered any more."),
        ("3", "Nothing was measured on one side, so that nothing is known: this is no pass."),
        ("4", "Nothing was comparable, so that nothing is known: this is no pass."),
        ("7", "The comparison did not work (exit code 7)."),
    ],
)
def test_the_exit_code_is_the_comparisons_and_is_said(repository: Repository, code: str, says: str) -> None:
    repository.summary.write_text("what an earlier step wrote\n")
    done = repository.run("main", VERDICT=code, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(repository.summary))
    assert done.returncode == int(code)
    assert (f"::error title=memplan::{says}" in done.stdout) == (code != "0")
    told = repository.summary.read_text()
    assert told.startswith("what an earlier step wrote\nhead ")
    assert says in told
    assert "the comparison of" in told


def test_an_older_base_is_asked_what_it_knows_and_the_rest_is_said(repository: Repository) -> None:
    repository.git("checkout", "-q", "main")
    repository.commit("old", knows=())
    repository.git("checkout", "-q", "-b", "later")
    repository.commit("head")
    done = repository.run("main", REPEAT="3")
    assert done.returncode == 0, done.stdout
    assert repository.climbs().count("head ci_cpu 3") == 1
    assert [climb for climb in repository.climbs() if climb.startswith("old ci_cpu")] == [
        "old ci_cpu 1",  # refuses the key
        "old ci_cpu 1",
        "old ci_cpu 2",  # refuses the option, and is not asked again
    ]
    told = (repository.folder / "build" / "pull_request" / "summary.md").read_text()
    assert "The base does not know 'parity' of ci_cpu.toml yet; it is asked without." in told
    assert "The base does not know --repeat yet: it climbs ci_cpu.toml once" in told
    assert "head does not know" not in told


def test_a_base_from_before_memplan_is_no_pass(repository: Repository) -> None:
    repository.git("checkout", "-q", "main")
    repository.commit("none", memplan=False)
    repository.git("checkout", "-q", "-b", "first")
    repository.commit("head")
    done = repository.run("main")
    assert done.returncode == 3
    assert "The merge base has no memplan" in done.stdout
    assert {version for version, *_ in repository.questions()} == {"head"}


def test_other_rungs_may_be_climbed_in_the_place_of_the_files(repository: Repository) -> None:
    files = [line for name in LADDERS for line in (TOP / "ladders" / f"{name}.toml").read_text().splitlines()]
    for rungs, shown in (("B3c1@full", {'rungs = "B3c1@full"'}), ("", {line for line in files if "rungs =" in line})):
        repository.asked.unlink(missing_ok=True)
        shutil.rmtree(repository.folder / "build", ignore_errors=True)
        repository.run("main", RUNGS=rungs)
        assert {given[-1] for _, verb, *given in repository.questions() if verb == "ladder"} == shown


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        ((), {}, "Type: .ci/pull_request BASE_REF [OUT]"),
        (
            ("main",),
            {"RUNGS": "B4c1/e; touch x"},
            "RUNGS is 'B4c1/e; touch x'; type rungs like B4c1,B8c2@full, without blanks.",
        ),
        (("main",), {"RUNGS": "four"}, "RUNGS is 'four'; type rungs like B4c1,B8c2@full, without blanks."),
        (("nowhere",), {}, "git knows no commit nowhere here. Fetch it first."),
        (("main",), {"REPEAT": "0"}, "REPEAT is 0; it must be 1 or more."),
        (("main", "memplan"), {}, "memplan has files already. Remove it, or name another folder."),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    repository: Repository, arguments: tuple[str, ...], settings: dict[str, str], says: str
) -> None:
    done = repository.run(*arguments, **settings)
    assert (done.returncode, done.stderr.strip()) == (2, says)
    assert not repository.asked.exists()


def test_every_option_that_the_script_types_is_one_of_the_command_line(repository: Repository) -> None:
    import typer

    from memplan.cli import verbs as all_verbs
    from memplan.cli_reports import SUMMARIES
    from memplan.cli_typer import application
    from memplan.report.render import check_form

    repository.run("main", REPEAT="2")
    verbs: dict[str, Any] = dict(typer.main.get_command(application(all_verbs())).commands)  # type: ignore[attr-defined]
    seen = set()
    for _, verb, *given in repository.questions():
        known = {name for parameter in verbs[verb].params for name in parameter.opts}
        typed = {word for word in given if word.startswith("-")}
        assert typed <= known, verb
        seen |= typed
        if "-o" in given:
            check_form(given[given.index("-o") + 1], SUMMARIES)
    assert seen == {"--out", "--resume", "--repeat", "-o"}


@pytest.mark.parametrize("name", LADDERS)
def test_the_ladders_of_a_pull_request_are_ladders_and_take_seconds(name: str) -> None:
    ladder = Ladder.from_toml(TOP / "ladders" / f"{name}.toml")
    assert ladder.device == name.removeprefix("ci_")
    assert len(list(ladder.points())) <= 2


def jobs() -> list[Any]:
    """Each job of each workflow, as `file:job`."""
    yaml = pytest.importorskip("yaml")
    found = []
    for path in WORKFLOWS:
        whole = yaml.safe_load(path.read_text(encoding="utf-8"))
        found += [pytest.param(whole, job, id=f"{path.stem}:{name}") for name, job in whole["jobs"].items()]
    return found


@pytest.mark.parametrize(("whole", "job"), jobs())
def test_a_job_may_little_ends_in_time_and_its_scripts_are_bash(whole: dict[Any, Any], job: dict[str, Any]) -> None:
    assert whole["permissions"] == {"contents": "read"}
    assert whole["concurrency"]["cancel-in-progress"] is True
    assert set(whole[True]) <= {"pull_request", "push"}  # YAML reads `on` as true; nothing that runs with more rights
    assert 0 < job["timeout-minutes"] <= 60
    assert job["runs-on"] == "ubuntu-latest"
    assert job.get("permissions", {}) in ({}, {"pull-requests": "write"})
    for step in job["steps"]:
        assert step["name"]
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), "pinned by commit"
        else:
            assert "${{" not in step["run"], "text from outside goes through the environment"
            done = subprocess.run(["bash", "-n"], input=step["run"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_who_may_write_runs_nothing_of_the_pull_request() -> None:
    writing = [param.values[1] for param in jobs() if param.values[1].get("permissions")]
    assert len(writing) == 1
    assert "head.repo.full_name == github.repository" in writing[0]["if"]
    assert "vars.MEMPLAN_COMMENT" in writing[0]["if"]
    assert not any("checkout" in step.get("uses", "") for step in writing[0]["steps"])


def test_what_github_runs_is_what_one_runs_at_home() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    called = set(re.findall(r"\.ci/\w+", re.sub(r"(?m)^\s*#.*", "", text)))
    assert called == {".ci/pull_request", ".ci/run"}
    assert ".ci/pull_request HEAD" in (TOP / ".ci" / "run").read_text(encoding="utf-8")
    for name in called:
        assert os.access(TOP / name, os.X_OK)
        assert subprocess.run(["bash", "-n", str(TOP / name)]).returncode == 0
    assert "secrets." not in text
