/** The form of a word that goes with a number; languages without forms have `other` alone. */
export type Forms = { other: string } & Partial<Record<Intl.LDMLPluralRule, string>>;

/** `#` in a form stands for the number, written as the language writes it. */
export function plural(language: string, forms: Forms): (count: number) => string {
  const rules = new Intl.PluralRules(language);
  const numbers = new Intl.NumberFormat(language);
  return (count) => (forms[rules.select(count)] ?? forms.other).replace("#", numbers.format(count));
}
