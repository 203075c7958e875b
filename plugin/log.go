package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// newLogger returns a logger that writes records in the form the bridge reads:
// one JSON object per line, as hclog does.
func newLogger(w io.Writer) *slog.Logger {
	level := slog.LevelInfo
	if s := os.Getenv(wire.LogLevelKey); s != "" {
		if err := level.UnmarshalText([]byte(s)); err != nil {
			level = slog.LevelInfo
		}
	}
	return slog.New(&handler{out: &output{w: w}, level: level})
}

// takeStandardLog redirects the default loggers of packages log and slog to the
// logger. Package log, used by net/http and others for errors without a caller,
// maps to level debug; otherwise the bridge would have to guess the level.
func takeStandardLog(l *slog.Logger) {
	slog.SetLogLoggerLevel(slog.LevelDebug)
	slog.SetDefault(l)
}

// handler is a slog.Handler. Groups become prefixes of keys: "group.key".
type handler struct {
	out    *output
	level  slog.Level
	attrs  []slog.Attr // with their prefixes
	prefix string
}

// output writes whole lines.
type output struct {
	mu sync.Mutex
	w  io.Writer // guarded by mu
}

var _ slog.Handler = (*handler)(nil)

// Enabled implements [slog.Handler].
func (h *handler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.level }

// WithAttrs implements [slog.Handler].
func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	g := *h
	g.attrs = append(append([]slog.Attr{}, h.attrs...), flatten(nil, h.prefix, attrs)...)
	return &g
}

// WithGroup implements [slog.Handler].
func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	g := *h
	g.prefix = h.prefix + name + "."
	return &g
}

// Handle implements [slog.Handler].
func (h *handler) Handle(_ context.Context, r slog.Record) error {
	line := make(map[string]any, 3+len(h.attrs)+r.NumAttrs())
	for _, a := range h.attrs {
		line[a.Key] = jsonValue(a.Value)
	}
	r.Attrs(func(a slog.Attr) bool {
		for _, a := range flatten(nil, h.prefix, []slog.Attr{a}) {
			line[a.Key] = jsonValue(a.Value)
		}
		return true
	})
	line["@level"] = levelName(r.Level)
	line["@message"] = r.Message
	if !r.Time.IsZero() {
		line["@timestamp"] = r.Time.Format("2006-01-02T15:04:05.000000Z07:00")
	}
	b, err := json.Marshal(line)
	if err != nil {
		return fmt.Errorf("encode log record %q: %w", r.Message, err)
	}
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	_, err = io.WriteString(h.out.w, redact(string(b))+"\n")
	return err
}

func levelName(l slog.Level) string {
	switch {
	case l < slog.LevelInfo:
		return "debug"
	case l < slog.LevelWarn:
		return "info"
	case l < slog.LevelError:
		return "warn"
	}
	return "error"
}

// flatten appends attrs to out with prefixed keys and with groups expanded.
func flatten(out []slog.Attr, prefix string, attrs []slog.Attr) []slog.Attr {
	for _, a := range attrs {
		a.Value = a.Value.Resolve()
		switch {
		case a.Equal(slog.Attr{}):
		case a.Value.Kind() == slog.KindGroup:
			p := prefix
			if a.Key != "" {
				p += a.Key + "."
			}
			out = flatten(out, p, a.Value.Group())
		default:
			out = append(out, slog.Attr{Key: prefix + strings.TrimPrefix(a.Key, "@"), Value: a.Value})
		}
	}
	return out
}

// jsonValue returns the JSON form of a value; encoding it never fails.
func jsonValue(v slog.Value) any {
	switch v.Kind() {
	case slog.KindString:
		return v.String()
	case slog.KindInt64:
		return v.Int64()
	case slog.KindUint64:
		return v.Uint64()
	case slog.KindBool:
		return v.Bool()
	case slog.KindDuration:
		return v.Duration().String()
	case slog.KindTime:
		return v.Time().Format(time.RFC3339Nano)
	case slog.KindAny:
		switch x := v.Any().(type) {
		case error:
			return x.Error()
		case fmt.Stringer:
			return x.String()
		default:
			if b, err := json.Marshal(x); err == nil {
				return json.RawMessage(b)
			}
		}
	}
	return v.String()
}
