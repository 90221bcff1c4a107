"""Billing's settings, from the environment only (`TORPOR_BILLING_…`)."""

from datetime import UTC, datetime
from decimal import Decimal

import pydantic
import pydantic_settings

from torpor_billing.domain.rates import LIST_PRICES, RateCard, checked
from torpor_eventlog.instants import to_us


class RateCardSetting(pydantic.BaseModel):
    """One rate card: prices per vCPU-second, GiB-second of memory and GiB-month of storage, from a moment on."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    version: str = pydantic.Field(min_length=1, max_length=64)
    valid_from: datetime | None = None
    currency: str = pydantic.Field(default="USD", pattern=r"^[A-Z]{3}$")
    vcpu_second: Decimal
    gib_second: Decimal
    stored_gib_month: Decimal

    def card(self) -> RateCard:
        """The card as the domain knows it; a time without a zone is UTC."""
        since = self.valid_from
        if since is not None and since.tzinfo is None:
            since = since.replace(tzinfo=UTC)
        return RateCard(
            version=self.version,
            valid_from_us=to_us(since) if since is not None else 0,
            currency=self.currency,
            vcpu_second=self.vcpu_second,
            gib_second=self.gib_second,
            stored_gib_month=self.stored_gib_month,
        )


class BillingSettings(pydantic_settings.BaseSettings):
    """`TORPOR_BILLING_RATE_CARDS`: a JSON list of rate cards; left out, the list prices hold."""

    model_config = pydantic_settings.SettingsConfigDict(env_prefix="TORPOR_BILLING_", frozen=True)

    rate_cards: tuple[RateCardSetting, ...] | None = None

    @pydantic.field_validator("rate_cards")
    @classmethod
    def _must_fit_together(cls, given: tuple[RateCardSetting, ...] | None) -> tuple[RateCardSetting, ...] | None:
        if given is not None:
            checked(setting.card() for setting in given)
        return given

    def cards(self) -> tuple[RateCard, ...]:
        """The rate cards in order of time."""
        if self.rate_cards is None:
            return (LIST_PRICES,)
        return checked(setting.card() for setting in self.rate_cards)
