/* A SPANK plug-in as sites have them, for tests: it adds --container-image and --zz-note to sbatch and srun, and hands
   their values to tasks as environment variables. The declarations are those of slurm/spank.h, so that no headers of
   Slurm are needed; SLURM_VERSION_NUMBER is set by whoever compiles it. */
#include <string.h>

typedef struct spank_handle *spank_t;
struct spank_option {
	char *name, *arginfo, *usage;
	int has_arg, val;
	int (*cb)(int val, const char *optarg, int remote);
};
extern int spank_option_register(spank_t spank, struct spank_option *option);
extern int spank_setenv(spank_t spank, const char *name, const char *value, int overwrite);

const char plugin_name[] = "zz_note";
const char plugin_type[] = "spank";
const unsigned int plugin_version = SLURM_VERSION_NUMBER;
const unsigned int spank_plugin_version = 1;

static const char *names[] = {"ZZ_IMAGE", "ZZ_NOTE"};
static char *values[2];

static int keep(int val, const char *optarg, int remote)
{
	values[val] = strdup(optarg);
	return 0;
}

static struct spank_option options[] = {
	{"container-image", "IMAGE", "the image to use", 1, 0, keep},
	{"zz-note", "TEXT", "a note for the tasks", 1, 1, keep},
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	for (int i = 0; i < 2; i++)
		if (spank_option_register(spank, &options[i]))
			return -1;
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	for (int i = 0; i < 2; i++)
		if (values[i])
			spank_setenv(spank, names[i], values[i], 1);
	return 0;
}
