/** Colours by name: the custom property that has the colour of a request's state, a phase, or an owner of blocks. */
const OF: Record<string, string> = {
  FREE: "--i-free",
  CACHED: "--i-cached",
  OVERFLOW: "--i-waiting",
  WAITING: "--i-waiting",
  PREFILL: "--i-prefill",
  DECODE: "--i-decode",
  PAUSED: "--i-paused",
  PREEMPTED: "--i-preempted",
  WAITING_FOR_REMOTE_KVS: "--i-fetching",
  RECOVERING: "--i-recovering",
  STEP: "--i-schedule",
  ENDED: "--i-ended",
  FINISHED_STOPPED: "--i-ended",
  FINISHED_LENGTH: "--i-ended",
  schedule: "--i-schedule",
  kernel: "--i-decode",
  sample: "--i-sample",
  detokenise: "--i-detokenise",
  send: "--i-send",
};

export const colourOf = (name: string): string =>
  OF[name] ?? OF[name.toUpperCase()] ?? (name.startsWith("FINISHED") ? "--i-failed" : "--i-other");
