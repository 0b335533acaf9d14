"""Published figures of ParaServe and two other systems, and the measured models.

Bytes are the FP16 checkpoints', in units of 10^9. TTFT of cold starts in seconds on V100 servers with 16 Gbit/s each; SLO
attainment of TTFT in per cent by coefficient of variation and requests per second on 2 servers
of 4 A10 and 4 servers of 4 V100.
"""

from __future__ import annotations

SIZES_GB = {
    "OPT-2.7B": 5.30,
    "OPT-6.7B": 13.32,
    "OPT-13B": 25.71,
    "Llama2-7B": 13.48,
    "Llama2-13B": 26.03,
    "Llama3-8B": 16.06,
    "Falcon-7B": 14.43,
}
COLD_TTFT_S = {
    "serverless vLLM": (16.8, 23.6, 40.3, 23.2, 38.6, 29.2, 25.4),
    "ServerlessLLM": (13.1, 17.1, 26.1, 19.1, 26.2, 21.2, 19.1),
    "one worker": (7.9, 9.7, 17.0, 9.9, 17.4, 11.7, 10.2),
    "four workers": (7.9, 8.2, 8.5, 7.7, 8.7, 8.6, 8.3),
}
RPS = (0.6, 0.7, 0.8)
ATTAINMENT = {
    "serverless vLLM": {2: (46.7, 45.7, 43.9), 4: (49.9, 48.6, 44.7), 8: (53.5, 53.3, 48.5)},
    "ServerlessLLM": {2: (57.5, 49.8, 45.3), 4: (61.5, 57.7, 47.7), 8: (60.3, 57.7, 54.0)},
    "pipeline": {2: (81.1, 77.2, 73.8), 4: (84.2, 78.2, 71.8), 8: (82.5, 76.3, 75.2)},
    "pipeline with cache": {2: (83.7, 79.1, 78.3), 4: (88.2, 83.8, 79.3), 8: (88.2, 85.0, 78.5)},
}
CLAIMED_TTFT, CLAIMED_ATTAINMENT = 4.7, 1.74
