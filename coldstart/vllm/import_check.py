"""Import torch and vLLM, and print torch's version and the device type of vLLM's platform, such as "2.13.0+cpu cpu".

`coldstart install` runs this file by its path, with the Python interpreter of the environment that it has created.
"""

import torch
from vllm.platforms import current_platform

if __name__ == "__main__":
    print(torch.__version__, current_platform.device_type)
