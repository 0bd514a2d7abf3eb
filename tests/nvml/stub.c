/* A libnvidia-ml.so.1 whose cards live in a text file, named by NVML_STUB: what the real bindings load in tests.
 *
 * Lines of the file, each about the card that was named last:
 *   t0 NS                 when the curves begin, by CLOCK_MONOTONIC
 *   init CODE             what nvmlInit returns
 *   gpu UUID BUS NAME     a card
 *   mig UUID GI CI        a slice of it
 *   at COUNTER S VALUE    a point of a curve, S seconds after t0: straight lines between, level before and after
 *   fail CALL CODE S      from S on, CALL returns CODE
 *   slow CALL US, busy CALL US   CALL (or *) sleeps, or computes, that long
 *   lost S, lives N       from S on the card is gone; or once its energy has been read N times
 *   wrap MJ, begin MJ     the energy counter starts again at 0 when it gets there; where it starts
 *   keeps COUNTER MS      the driver keeps that counter (power, util, membw) every so many ms
 *   gpm                   it has performance counters
 * What was called, and how often, is written to NVML_STUB_CALLS at the end.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, LOST = 15 };
enum { POWER, UTIL, MEMBW, MEMUSED, MEMTOTAL, SM, MEM, TEMP, THROTTLE, GPM0, COUNTERS = GPM0 + 16 };
static const char *NAMES[] = {"power", "util", "membw", "memused", "memtotal", "sm", "mem", "temp", "throttle"};

typedef struct { int n; double at[512], value[512]; double keeps_ms; } Curve;
typedef struct { char call[64]; int code; double from; } Failure;
typedef struct { char call[64]; double us; int busy; } Delay;
typedef struct Card {
    char uuid[96], bus[32], name[96];
    struct Card *parent;
    int gi, ci, gpm, failures, delays, lives, reads;
    double lost, wrap, begin;
    Curve curves[COUNTERS];
    Failure fail[32];
    Delay delay[32];
} Card;
typedef struct { Card *card; double at; } Look;

static Card *cards[64];
static int count, init_code, ready;
static double t0;
static struct { char call[64]; long n; } calls[64];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9 - t0;
}

static int counter(const char *name) {
    for (int i = 0; i < GPM0; i++) if (!strcmp(name, NAMES[i])) return i;
    return strncmp(name, "gpm", 3) ? -1 : GPM0 + atoi(name + 3);
}

static double value(Card *c, int which, double s) {
    Curve *k = &c->curves[which];
    if (!k->n) return 0;
    if (s <= k->at[0]) return k->value[0];
    for (int i = 1; i < k->n; i++)
        if (s < k->at[i]) {
            double f = (s - k->at[i - 1]) / (k->at[i] - k->at[i - 1]);
            return which == THROTTLE ? k->value[i - 1] : k->value[i - 1] + f * (k->value[i] - k->value[i - 1]);
        }
    return k->value[k->n - 1];
}

/* Of the power, watts: its integral from 0 to s. */
static double joules(Card *c, double s) {
    Curve *k = &c->curves[POWER];
    double sum = 0, last = 0;
    for (int i = 0; i < k->n && k->at[i] < s; i++) {
        if (k->at[i] <= last) continue;
        sum += (k->at[i] - last) * (value(c, POWER, last) + value(c, POWER, k->at[i])) / 2;
        last = k->at[i];
    }
    return sum + (s - last) * (value(c, POWER, last) + value(c, POWER, s)) / 2;
}

static void load(void) {
    char line[512], word[64], name[64];
    double a, b;
    Card *c = NULL;
    FILE *f = getenv("NVML_STUB") ? fopen(getenv("NVML_STUB"), "r") : NULL;
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%63s", word) != 1 || word[0] == '#') continue;
        if (!strcmp(word, "t0")) t0 = atof(line + 3) / 1e9;
        else if (!strcmp(word, "init")) init_code = atoi(line + 5);
        else if (!strcmp(word, "gpu") || !strcmp(word, "mig")) {
            Card *made = cards[count++] = calloc(1, sizeof *c);
            made->lost = INFINITY;
            if (word[0] == 'g') {
                int end = 0;
                sscanf(line, "%*s %95s %31s %n", made->uuid, made->bus, &end);
                strncpy(made->name, line + end, 95);
                c = made;
            } else {
                sscanf(line, "%*s %95s %d %d", made->uuid, &made->gi, &made->ci);
                made->parent = c->parent ? c->parent : c;
                strcpy(made->name, made->parent->name);
                c = made;
            }
        }
        else if (!c) continue;
        else if (sscanf(line, "at %63s %lf %lf", name, &a, &b) == 3) {
            Curve *k = &c->curves[counter(name)];
            k->at[k->n] = a; k->value[k->n++] = b;
        }
        else if (sscanf(line, "fail %63s %lf %lf", name, &a, &b) == 3) {
            Failure *x = &c->fail[c->failures++];
            strcpy(x->call, name); x->code = (int)a; x->from = b;
        }
        else if (sscanf(line, "slow %63s %lf", name, &a) == 2 || sscanf(line, "busy %63s %lf", name, &a) == 2) {
            Delay *x = &c->delay[c->delays++];
            strcpy(x->call, name); x->us = a; x->busy = word[0] == 'b';
        }
        else if (!strcmp(word, "lost")) c->lost = atof(line + 5);
        else if (!strcmp(word, "lives")) c->lives = atoi(line + 6);
        else if (!strcmp(word, "wrap")) c->wrap = atof(line + 5);
        else if (!strcmp(word, "begin")) c->begin = atof(line + 6);
        else if (sscanf(line, "keeps %63s %lf", name, &a) == 2) c->curves[counter(name)].keeps_ms = a;
        else if (!strcmp(word, "gpm")) c->gpm = 1;
    }
    fclose(f);
}

static void note(const char *call) {
    int i = 0;
    while (i < 63 && calls[i].n && strcmp(calls[i].call, call)) i++;
    strncpy(calls[i].call, call, 63);
    calls[i].n++;
}

static void pass(const Delay *d) {
    double until = now() + d->us / 1e6;
    if (!d->busy) usleep((useconds_t)d->us);
    while (now() < until) ;
}

/* What a call on a card returns before it does anything. */
static int enter(Card *c, const char *call) {
    note(call);
    if (!ready) return UNINITIALIZED;
    if (!c) return INVALID;
    Card *whole = c->parent ? c->parent : c;
    for (int i = 0; i < whole->delays; i++)
        if (!strcmp(whole->delay[i].call, call) || whole->delay[i].call[0] == '*') {
            pass(&whole->delay[i]);
            break;
        }
    if (!strcmp(call, "nvmlDeviceGetTotalEnergyConsumption") && whole->reads++ == whole->lives && whole->lives)
        whole->lost = -INFINITY;
    if (now() >= whole->lost) return LOST;
    for (Card *each = c; each; each = each->parent)
        for (int i = 0; i < each->failures; i++)
            if (!strcmp(each->fail[i].call, call) && now() >= each->fail[i].from) return each->fail[i].code;
    return OK;
}

#define ENTER(c) do { int r_ = enter(c, __func__); if (r_) return r_; } while (0)
#define WHOLE(c) do { ENTER(c); if ((c)->parent) return NOT_SUPPORTED; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!count) load();
    note(__func__);
    ready = !init_code;
    return init_code;
}

int nvmlShutdown(void) {
    FILE *f = getenv("NVML_STUB_CALLS") ? fopen(getenv("NVML_STUB_CALLS"), "w") : NULL;
    for (int i = 0; f && i < 64 && calls[i].n; i++) fprintf(f, "%s %ld\n", calls[i].call, calls[i].n);
    if (f) fclose(f);
    ready = 0;
    return OK;
}

const char *nvmlErrorString(int code) {
    switch (code) {
        case NOT_SUPPORTED: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case LOST: return "GPU is lost";
        default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *n) {
    note(__func__);
    *n = 0;
    for (int i = 0; i < count; i++) *n += !cards[i]->parent;
    return ready ? OK : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Card **c) {
    note(__func__);
    for (int i = 0; i < count; i++)
        if (!cards[i]->parent && !index--) { *c = cards[i]; return enter(*c, "open"); }
    return INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Card **c) {
    note(__func__);
    for (int i = 0; i < count; i++)
        if (!strcmp(cards[i]->uuid, uuid)) { *c = cards[i]; return enter(*c, "open"); }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Card **c) {
    note(__func__);
    for (int i = 0; i < count; i++)
        if (!cards[i]->parent && !strcasecmp(cards[i]->bus, bus)) { *c = cards[i]; return enter(*c, "open"); }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Card *c, char *name, unsigned n) { ENTER(c); snprintf(name, n, "%s", c->name); return OK; }
int nvmlDeviceGetUUID(Card *c, char *uuid, unsigned n) { ENTER(c); snprintf(uuid, n, "%s", c->uuid); return OK; }

int nvmlDeviceGetMaxMigDeviceCount(Card *c, unsigned *n) {
    ENTER(c);
    *n = 0;
    for (int i = 0; i < count; i++) *n += cards[i]->parent == c;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Card *c, unsigned index, Card **found) {
    ENTER(c);
    for (int i = 0; i < count; i++)
        if (cards[i]->parent == c && !index--) { *found = cards[i]; return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Card *c, Card **found) { ENTER(c); *found = c->parent; return OK; }
int nvmlDeviceGetGpuInstanceId(Card *c, unsigned *id) { ENTER(c); *id = c->gi; return OK; }
int nvmlDeviceGetComputeInstanceId(Card *c, unsigned *id) { ENTER(c); *id = c->ci; return OK; }

int nvmlDeviceGetUtilizationRates(Card *c, unsigned rates[2]) {
    WHOLE(c);
    rates[0] = lround(value(c, UTIL, now()));
    rates[1] = lround(value(c, MEMBW, now()));
    return OK;
}

int nvmlDeviceGetMemoryInfo(Card *c, unsigned long long memory[3]) {
    ENTER(c);
    memory[0] = value(c, MEMTOTAL, now());
    memory[2] = value(c, MEMUSED, now());
    memory[1] = memory[0] - memory[2];
    return OK;
}

int nvmlDeviceGetPowerUsage(Card *c, unsigned *mw) { WHOLE(c); *mw = lround(value(c, POWER, now()) * 1e3); return OK; }

int nvmlDeviceGetTotalEnergyConsumption(Card *c, unsigned long long *mj) {
    WHOLE(c);
    double e = c->begin + joules(c, now()) * 1e3;
    *mj = c->wrap ? fmod(e, c->wrap) : e;
    return OK;
}

int nvmlDeviceGetClockInfo(Card *c, int type, unsigned *mhz) {
    ENTER(c);
    *mhz = lround(value(c, type == 1 ? SM : MEM, now()));
    return OK;
}

int nvmlDeviceGetTemperature(Card *c, int sensor, unsigned *t) {
    ENTER(c);
    (void)sensor;
    *t = lround(value(c, TEMP, now()));
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(Card *c, unsigned long long *bits) {
    ENTER(c);
    *bits = value(c, THROTTLE, now());
    return OK;
}

typedef struct { unsigned long long at; union { double d; unsigned ui; unsigned long long ull; } value; } Sample;

int nvmlDeviceGetSamples(Card *c, int type, unsigned long long since, int *kind, unsigned *n, Sample *out) {
    WHOLE(c);
    Curve *k = &c->curves[type];
    if (type > MEMBW || !k->keeps_ms) return NOT_SUPPORTED;
    /* What is kept has been stamped once: the wall clock is looked at the first time only. */
    static double wall0;
    if (!wall0) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        wall0 = t.tv_sec + t.tv_nsec / 1e9 - now();
    }
    double s = now(), step = k->keeps_ms / 1e3;
    long last = (long)floor(s / step), first = last - 119, room = out ? *n : 120;
    unsigned found = 0;
    *kind = 1;
    for (long i = first; i <= last && found < room; i++) {
        double at = (wall0 + i * step) * 1e6;
        if (at <= since) continue;
        if (out) {
            out[found].at = llround(at);
            out[found].value.ui = lround(value(c, type, i * step) * (type == POWER ? 1e3 : 1));
        }
        found++;
    }
    *n = found;
    return OK;
}

typedef struct { unsigned version, supported; } Support;
typedef struct { unsigned id; int result; double value; void *info[3]; } Metric;
typedef struct { unsigned version, n; Look *from, *to; Metric metrics[]; } Metrics;

int nvmlGpmQueryDeviceSupport(Card *c, Support *s) { ENTER(c); s->supported = c->gpm; return OK; }
int nvmlGpmSampleAlloc(Look **l) { note(__func__); *l = calloc(1, sizeof **l); return OK; }
int nvmlGpmSampleGet(Card *c, Look *l) { ENTER(c); l->card = c; l->at = now(); return OK; }
int nvmlGpmMigSampleGet(Card *c, unsigned gi, Look *l) { ENTER(c); (void)gi; l->card = c; l->at = now(); return OK; }

int nvmlGpmMetricsGet(Metrics *m) {
    note(__func__);
    if (m->from->at >= m->to->at) return INVALID;
    for (unsigned i = 0; i < m->n; i++) {
        m->metrics[i].result = OK;
        m->metrics[i].value = value(m->to->card, GPM0 + m->metrics[i].id, (m->from->at + m->to->at) / 2);
    }
    return OK;
}
