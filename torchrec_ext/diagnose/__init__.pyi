from .clock import ThreadClock as ThreadClock
from .facts import Facts as Facts
from .facts import Gain as Gain
from .report import Diagnosis as Diagnosis
from .rules import Finding as Finding
from .rules import Remedy as Remedy
from .state import StateCopy as StateCopy
from .why import why_slow as why_slow
