/** Conversations in groups by when they were written to last, as one remembers them. */
export type Age = "today" | "yesterday" | "lastWeek" | "earlier";

export interface AgeGroup<C> {
  age: Age;
  conversations: C[];
}

const DAYS_OF_WEEK = 7;

/** `conversations`: the youngest first, which stays so in each group; groups without any are left out. `now`: ms since 1970. */
export function groupsByAge<C extends { changedAt: number }>(conversations: readonly C[], now: number): AgeGroup<C>[] {
  const groups: AgeGroup<C>[] = [];
  for (const conversation of conversations) {
    const age = ageOf(conversation.changedAt, now);
    const last = groups.at(-1);
    if (last?.age === age) last.conversations.push(conversation);
    else groups.push({ age, conversations: [conversation] });
  }
  return groups;
}

/** By the reader's own days, which begin at their midnight; a clock that was put back makes nothing younger than today. */
function ageOf(time: number, now: number): Age {
  if (time >= midnight(now, 0)) return "today";
  if (time >= midnight(now, 1)) return "yesterday";
  return time >= midnight(now, DAYS_OF_WEEK) ? "lastWeek" : "earlier";
}

function midnight(now: number, daysBefore: number): number {
  const date = new Date(now);
  return new Date(date.getFullYear(), date.getMonth(), date.getDate() - daysBefore).getTime();
}
