package supervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// maxLine is the longest line of a plugin's output that is logged whole, in bytes; the rest of a longer one is a line of its own.
	maxLine = 64 << 10
	// maxLines is the number of lines of one plugin that are logged in a second; the others are counted.
	maxLines = 500
	// maxLast is how much of the last plain line is shown when the process ends, in bytes.
	maxLast = 300
)

// logPump puts a plugin's output into the log.
type logPump struct {
	log *slog.Logger

	mu sync.Mutex
	// guarded by mu
	window  time.Time // beginning of the present second
	lines   int       // logged in it
	dropped int       // not logged in it
	panics  bool      // a panic's stack is being printed
	words   string    // the first line of a panic, else the last line of level error or plain
}

func newLogPump(log *slog.Logger) *logPump { return &logPump{log: log} }

// last returns what a person should see first when the process ended, "" if it said nothing.
func (l *logPump) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.words
}

// copy logs each line of r, up to its end.
func (l *logPump) copy(r io.Reader, stream string) {
	br := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := br.ReadSlice('\n')
		if len(line) > 0 {
			l.line(strings.ToValidUTF8(strings.TrimRight(string(line), "\r\n"), "\uFFFD"), stream)
		}
		if err != nil && err != bufio.ErrBufferFull { //nolint:errorlint // bufio returns it as it is
			break
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reportLocked()
}

// allow says whether another line may be logged.
func (l *logPump) allowLocked() bool {
	if now := time.Now(); now.Sub(l.window) >= time.Second {
		l.reportLocked()
		l.window, l.lines = now, 0
	}
	if l.lines >= maxLines {
		l.dropped++
		return false
	}
	l.lines++
	return true
}

func (l *logPump) reportLocked() {
	if l.dropped > 0 {
		l.log.Warn("the plugin logs too much; lines were dropped", "lines", l.dropped)
		l.dropped = 0
	}
}

func (l *logPump) line(line, stream string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	level, msg, attrs, structured := parseLine(line)
	if !structured {
		if strings.TrimSpace(line) == "" {
			return
		}
		first := strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ")
		if first {
			l.panics = true
		}
		if l.panics {
			level = slog.LevelError
		}
		if stream == "stdout" {
			attrs = append(attrs, slog.String("stream", stream))
		}
		if first || !l.panics {
			l.words = clip(line, maxLast)
		}
	} else if level >= slog.LevelError {
		l.words = clip(msg, maxLast)
		for _, a := range attrs {
			if a.Key == "err" {
				l.words = clip(msg+": "+a.Value.String(), maxLast)
			}
		}
	}
	ctx := context.Background()
	if !l.log.Enabled(ctx, level) || !l.allowLocked() {
		return
	}
	l.log.LogAttrs(ctx, level, msg, attrs...)
}

func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "..."
}

// parseLine understands the JSON that hclog and the SDK write; everything else is a plain line. Nothing in a line can make it
// panic.
func parseLine(line string) (level slog.Level, msg string, attrs []slog.Attr, structured bool) {
	var fields map[string]any
	if strings.HasPrefix(line, "{") && json.Unmarshal([]byte(line), &fields) == nil {
		name, okLevel := fields["@level"].(string)
		msg, okMsg := fields["@message"].(string)
		if okLevel && okMsg {
			for _, k := range slices.Sorted(maps.Keys(fields)) {
				switch {
				case strings.HasPrefix(k, "@"), k == "registry", k == "adapter": // the bridge's logger has them
				default:
					attrs = append(attrs, slog.Any(k, fields[k]))
				}
			}
			return levelOf(name), msg, attrs, true
		}
	}
	for prefix, level := range map[string]slog.Level{
		"[TRACE]": slog.LevelDebug,
		"[DEBUG]": slog.LevelDebug,
		"[INFO]":  slog.LevelInfo,
		"[WARN]":  slog.LevelWarn,
		"[ERROR]": slog.LevelError,
	} {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return level, strings.TrimSpace(rest), nil, false
		}
	}
	return slog.LevelInfo, line, nil, false
}

func levelOf(name string) slog.Level {
	switch strings.ToLower(name) {
	case "trace", "debug":
		return slog.LevelDebug
	case "warn", "warning":
		return slog.LevelWarn
	case "error", "fatal", "panic":
		return slog.LevelError
	}
	return slog.LevelInfo
}
