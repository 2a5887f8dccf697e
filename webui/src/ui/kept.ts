/** Small choices that the browser keeps. One that is told to keep nothing throws at the very name of its storage. */

/** The storage beyond this tab, or of this tab alone; null where there is none. */
function storage(isOfTab: boolean): Storage | null {
  try {
    return isOfTab ? sessionStorage : localStorage;
  } catch {
    return null;
  }
}

export function kept(name: string, isOfTab = false): string | null {
  return storage(isOfTab)?.getItem(name) ?? null;
}

/** Keep `value`, or with null forget it; false where it could not be kept, as there is no room. */
export function keep(name: string, value: string | null, isOfTab = false): boolean {
  const found = storage(isOfTab);
  if (found === null) return value === null;
  try {
    if (value === null) found.removeItem(name);
    else found.setItem(name, value);
    return true;
  } catch {
    return false;
  }
}
