"""The state machine of commits with a model of etcd that loses requests and answers."""

from __future__ import annotations

from random import Random

import pytest

from penstock.cluster.commit import CommitFrame, Head, LogCommits, Verdict, decode_frame, decode_head, encode_frame
from penstock.errors import StorageError

IDENTITY = b"identity"


class ModelEtcd:
    """The leadership key and the head of a log, as etcd has them: transactions are executed one after the other."""

    def __init__(self, term: int) -> None:
        self.leader = term
        self.revision = term
        self.head = Head(IDENTITY, 0, term, term)
        self.frames: list[tuple[int, int, str]] = []
        """Term, sequence and content of every commit."""

    def transaction(self, term: int, compared: int, head: Head, content: str) -> bool:
        if self.leader != term or self.head.revision != compared:
            return False
        self.revision += 1
        self.head = head._replace(revision=self.revision)
        self.frames.append((term, head.sequence, content))
        return True

    def elect(self) -> int:
        self.revision += 1
        self.leader = self.revision
        return self.leader


def test_a_commit_is_accepted_and_the_next_one_compares_its_revision() -> None:
    commits = LogCommits(5, Head(IDENTITY, 7, 3, 40))
    assert commits.begin(8, 100) == Head(IDENTITY, 8, 5, total_bytes=100)
    assert commits.accepted(44) is Verdict.ACCEPTED
    assert commits.head == Head(IDENTITY, 8, 5, 44, 100)
    commits.begin(9, 100)


def test_a_commit_in_doubt_was_accepted_if_the_head_is_its_own() -> None:
    commits = LogCommits(5, Head(IDENTITY, 7, 5, 40))
    commits.begin(8, 100)
    commits.unanswered()
    assert commits.in_doubt
    assert commits.refused(Head(IDENTITY, 8, 5, 41), 5) is Verdict.ACCEPTED
    assert commits.head == Head(IDENTITY, 8, 5, 41, 100)


def test_a_commit_in_doubt_counts_although_the_leadership_has_ended_since() -> None:
    commits = LogCommits(5, Head(IDENTITY, 7, 5, 40))
    commits.begin(8, 100)
    commits.unanswered()
    assert commits.refused(Head(IDENTITY, 8, 5, 41), 0) is Verdict.ACCEPTED
    commits.begin(9, 100)
    assert commits.refused(Head(IDENTITY, 8, 5, 41), 0) is Verdict.FENCED


@pytest.mark.parametrize("leader", [0, 6])
def test_another_leader_or_none_fences(leader: int) -> None:
    commits = LogCommits(5, Head(IDENTITY, 7, 5, 40))
    commits.begin(8, 100)
    assert commits.refused(Head(IDENTITY, 7, 5, 40), leader) is Verdict.FENCED
    assert commits.ended is Verdict.FENCED


@pytest.mark.parametrize(
    "head",
    [
        None,
        Head(IDENTITY, 6, 5, 39),  # a backup from before the last commit
        Head(IDENTITY, 7, 5, 41),
        Head(b"another!", 8, 5, 41),
        Head(IDENTITY, 8, 5, 41),  # its own head without an attempt in doubt
    ],
)
def test_another_head_under_the_same_leadership_is_another_log(head: Head | None) -> None:
    commits = LogCommits(5, Head(IDENTITY, 7, 5, 40))
    commits.begin(8, 100)
    assert commits.refused(head, 5) is Verdict.DIVERGED


def test_commits_have_no_gaps_and_are_one_at_a_time() -> None:
    commits = LogCommits(5, Head(IDENTITY, 7, 5, 40))
    for _ in range(2):
        with pytest.raises(AssertionError, match="no gaps"):
            commits.begin(9, 100)
        commits.begin(8, 100)


def test_a_commit_in_doubt_stays_so_when_it_is_repeated() -> None:
    """etcd did not answer, then it was full, and the caller repeats the commit when there is space."""
    commits = LogCommits(5, Head(IDENTITY, 7, 5, 40))
    head = commits.begin(8, 100)
    commits.unanswered()
    assert commits.begin(8, 100) == head
    assert commits.refused(Head(IDENTITY, 8, 5, 41), 5) is Verdict.ACCEPTED


@pytest.mark.parametrize("seed", range(200))
def test_acknowledged_commits_are_in_the_log_once_and_in_order(seed: int) -> None:
    """Requests and answers are lost or late, and another node is elected at some point, perhaps before the head is
    read."""
    random = Random(seed)
    etcd = ModelEtcd(1)
    commits = LogCommits(1, etcd.head)
    late: list[tuple[int, Head, str]] = []
    acknowledged: list[str] = []
    elected_at = random.randrange(5, 60)

    def elect() -> None:
        term = etcd.elect()
        etcd.transaction(term, etcd.head.revision, Head(IDENTITY, etcd.head.sequence + 1, term), "of another node")

    for number in range(60):
        if number == elected_at:
            elect()
        content = f"commit {number}"
        compared = commits.head.revision
        head = commits.begin(commits.head.sequence + 1, 100)
        verdict = None
        while verdict is None:
            if late and random.random() < 0.3:  # an attempt of now or of earlier arrives late
                etcd.transaction(1, *late.pop(random.randrange(len(late))))
            chance = random.random()
            if chance < 0.2:  # the request is lost, or late
                if random.random() < 0.5:
                    late.append((compared, head, content))
                commits.unanswered()
                continue
            done = etcd.transaction(1, compared, head, content)
            if chance < 0.4:  # the answer is lost
                commits.unanswered()
            elif done:
                verdict = commits.accepted(etcd.head.revision)
            else:
                if etcd.leader == 1 and random.random() < 0.3:
                    elect()
                verdict = commits.refused(etcd.head, etcd.leader)
        if verdict is not Verdict.ACCEPTED:
            assert verdict is Verdict.FENCED
            break
        acknowledged.append(content)
    own = [content for term, _, content in etcd.frames if term == 1]
    assert [sequence for _, sequence, _ in etcd.frames] == list(range(1, len(etcd.frames) + 1))
    assert acknowledged == own[: len(acknowledged)]
    assert len(own) <= len(acknowledged) + 1, "one commit in doubt may be in the log without an acknowledgement"
    assert etcd.leader != 1
    assert len(set(own)) == len(own)


def test_heads_and_frames_are_stored_with_checksums() -> None:
    head = Head(IDENTITY, 1 << 40, 77, total_bytes=9000)
    assert decode_head(head.encode(), 9) == head._replace(revision=9)
    value = encode_frame(head, 1_700_000_000_000, b"body")
    assert decode_frame(value)[:5] == (77, 1 << 40, 1_700_000_000_000, 9000, 0)
    assert decode_frame(value).body == b"body"
    divided = decode_frame(encode_frame(head, 5, b"large", parts=2))
    assert divided == CommitFrame(77, 1 << 40, 5, 9000, 2, divided.checksum, b"")
    for damaged in (head.encode()[:-1], head.encode()[:-1] + b"\0", b""):
        with pytest.raises(StorageError, match="is damaged"):
            decode_head(damaged, 9)
    for damaged in (value[:-1], value[:8], b""):
        with pytest.raises(StorageError, match="is damaged"):
            decode_frame(damaged)
