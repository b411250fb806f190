"""The policy losses, in one place. A new one is a file with its settings and its function, a member of `Method` and an arm below."""

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.cispo import Cispo, cispo
from stages.learning.losses.dppo import Dppo, dppo
from stages.learning.losses.dro import Dro, dro
from stages.learning.losses.gmpo import Gmpo, gmpo
from stages.learning.losses.gspo import Gspo, gspo
from stages.learning.losses.kl_cov import KlCov, kl_cov
from stages.learning.losses.ppo import Ppo, ppo
from stages.learning.losses.reinforce import Likelihood, Reinforce, likelihood, reinforce
from stages.learning.losses.sapo import Sapo, sapo
from stages.learning.losses.vespo import Vespo, vespo

Method = Ppo | Gspo | Cispo | Sapo | Dppo | Reinforce | Likelihood | Dro | Gmpo | Vespo | KlCov


def surrogate(tokens: Tokens, method: Method) -> Surrogate:
    """The method's loss of each token."""
    match method:
        case Ppo():
            return ppo(tokens, method)
        case Gspo():
            return gspo(tokens, method)
        case Cispo():
            return cispo(tokens, method)
        case Sapo():
            return sapo(tokens, method)
        case Dppo():
            return dppo(tokens, method)
        case Reinforce():
            return reinforce(tokens)
        case Likelihood():
            return likelihood(tokens)
        case Dro():
            return dro(tokens, method)
        case Gmpo():
            return gmpo(tokens, method)
        case Vespo():
            return vespo(tokens, method)
        case KlCov():
            return kl_cov(tokens, method)
