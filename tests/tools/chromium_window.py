"""Show one page in Qt's Chromium, without a screen, until the process is ended: `python chromium_window.py DEVTOOLS_PORT`.

It runs in the environment that `fetch-chromium.sh` makes, which has PyQt6 and nothing of this project.
"""

import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # containers lack what it needs
os.environ["QTWEBENGINE_REMOTE_DEBUGGING"] = sys.argv[1]

from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

FLAGS = ["--disable-gpu", "--host-resolver-rules=MAP *.test 127.0.0.1"]

app = QApplication([sys.argv[0], "--webEngineArgs", *FLAGS])
view = QWebEngineView()
view.resize(1280, 900)
view.load(QUrl("about:blank"))
view.show()
sys.exit(app.exec())
