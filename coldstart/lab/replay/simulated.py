"""Records of a simulated run, so that live and simulated replays share every metric."""

from __future__ import annotations

from coldstart.lab.replay.record import RequestRecord
from coldstart.lab.scheduling.state import Outcome, SimJob


def records_of(outcome: Outcome) -> list[RequestRecord]:
    """One record per job, in order of arrival; the simulator's client is never late."""
    return [record_of(job) for job in outcome.jobs]


def record_of(job: SimJob) -> RequestRecord:
    """A job is named by its number in the trace."""
    return RequestRecord(
        number=int(job.job.id),
        due_s=job.job.arrival_s,
        prompt_tokens=job.job.prompt_tokens,
        wanted_tokens=job.output,
        model=job.model,
        target="simulated",
        sent_s=job.job.arrival_s,
        first_token_s=job.first_token_s,
        finished_s=job.finished_s,
        output_tokens=job.delivered,
    )
