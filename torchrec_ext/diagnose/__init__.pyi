from torchrec_ext.observe.clock import ThreadClock as ThreadClock
from torchrec_ext.observe.state_copy import StateCopy as StateCopy

from .facts import Facts as Facts
from .facts import Gain as Gain
from .findings import Finding as Finding
from .findings import Remedy as Remedy
from .report import Diagnosis as Diagnosis
from .why import why_slow as why_slow
