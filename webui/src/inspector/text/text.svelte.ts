/** The inspector's words in the language of the page; they are apart from the chat's, which does not load them. */
import { i18n } from "../../i18n/i18n.svelte";
import { en, type Text } from "./en";
import { zh } from "./zh";

const LANGUAGES: Record<string, Text> = { en, zh };

export const text = {
  get t(): Text {
    return LANGUAGES[i18n.language] ?? en;
  },
};

/** Formats by language: to make one takes twenty times as long as to use it, and a busy view writes thousands a second. */
function kept<T>(make: (language: string) => T): () => T {
  const made = new Map<string, T>();
  return () => {
    const { language } = i18n;
    const known = made.get(language) ?? make(language);
    made.set(language, known);
    return known;
  };
}

const whole = kept((language) => new Intl.NumberFormat(language, { maximumFractionDigits: 0 }));
const compact = kept((language) => new Intl.NumberFormat(language, { notation: "compact", maximumFractionDigits: 1 }));
const timeOfDay = kept(
  (language) =>
    new Intl.DateTimeFormat(language, {
      hour: "2-digit",
      minute: "2-digit",
      second: "2-digit",
      fractionalSecondDigits: 3,
      hour12: false,
    }),
);

/** 1,234, or 1.2 M where it is longer than a column. */
export const count = (value: number): string => (Math.abs(value) >= 100_000 ? compact() : whole()).format(value);

/** As short as it stays exact to a few parts in a hundred: 40 µs, 0.4 ms, 12 ms, 1.2 s, 48 s, 3 min 5 s. */
export function duration(seconds: number): string {
  if (seconds > 0 && seconds < 0.0000995) return text.t.microseconds((seconds * 1e6).toFixed(0));
  if (seconds < 0.0995) {
    const ms = seconds * 1000;
    return text.t.milliseconds(ms.toFixed(ms > 0 && ms < 9.95 ? 1 : 0));
  }
  if (seconds < 60) return text.t.seconds(seconds.toFixed(seconds < 9.95 ? (seconds < 1 ? 2 : 1) : 0));
  const [minutes, rest] = [Math.floor(seconds / 60), Math.floor(seconds % 60)];
  if (minutes < 60) return text.t.minutes(minutes, rest);
  return text.t.hours(Math.floor(minutes / 60), minutes % 60);
}

export const clock = (time: number): string => timeOfDay().format(time * 1000);
