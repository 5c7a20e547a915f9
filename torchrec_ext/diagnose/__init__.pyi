from torchrec_ext.observe.clock import ThreadClock as ThreadClock
from torchrec_ext.observe.state_copy import StateCopy as StateCopy

from .findings import Facts as Facts
from .findings import Finding as Finding
from .findings import Gain as Gain
from .findings import Remedy as Remedy
from .findings import Trial as Trial
from .report import Diagnosis as Diagnosis
from .why import why_slow as why_slow
